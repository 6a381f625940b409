"""The default policies of a server, by name, since this package may not import them."""

from __future__ import annotations

from functools import cache
from typing import Any

from vsched.config import Config
from vsched.config.policies import policy_table
from vsched.plugins import check_contract, resolve_policy
from vsched.policy import KERNEL_TABLES, POLICY_TABLES, SEVERAL, Policy, decisions_of, tables_of
from vsched.policy_host import SeatPolicies

_ENDS = [table.rpartition(".")[2] for table in POLICY_TABLES]
SEATS = {
    table.replace(".", "_") if _ENDS.count(end) > 1 else end: table
    for table, end in zip(POLICY_TABLES, _ENDS, strict=True)
    if table in KERNEL_TABLES
}
"""Tables of the policies that the kernel calls, by short names, such as `preemption` and `encode_admission`."""


def default_policies(policy: Policy | None = None, /, **changes: Policy) -> SeatPolicies:
    """Return the default policies of a server, with replacements by the names in `SEATS`.

    A positional `policy` makes all decisions that it has methods for, with one state if there are several.

    Raises:
        PolicyError: When the policy does not meet its contract.
    """
    by_table: dict[str, Policy] = {table: _default_of(table) for table in SEATS.values()}
    several = None
    if policy is not None:
        check_contract(type(policy), SEVERAL)
        by_table |= dict.fromkeys(tables_of(type(policy)), policy)
        several = policy if len(decisions_of(type(policy))) > 1 else None
    by_table |= {SEATS[name]: one for name, one in changes.items()}
    return SeatPolicies(by_table=by_table, several=several, build=resolve_policy)


def seats_of(decision: str) -> list[str]:
    """Return the names in `SEATS` for a decision."""
    return [name for name, table in SEATS.items() if POLICY_TABLES[table] == decision]


@cache
def _default_of(table: str) -> Policy:
    """Return the default policy of a table; requests take turns between replicas."""
    fields: dict[str, Any] = policy_table(Config(), table)
    if table == "routing":
        fields = {"use": "round-robin"}
    return resolve_policy(POLICY_TABLES[table], fields)
