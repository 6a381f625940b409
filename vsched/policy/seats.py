"""Tables of the decisions that policies make, and of the seats: the configuration tables that select a policy for each.

Used by configuration, kernel, simulators, commands and documentation. The file of each subject declares its decisions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from vsched.errors import ConfigError
from vsched.policy import cache, drafter, images, memory, requests, router, videos
from vsched.policy.base import Policy, decisions_in

DECISIONS = {
    one.name: one
    for module in (requests, images, cache, router, memory, drafter, videos)
    for cls in vars(module).values()
    if isinstance(cls, type)
    for one in decisions_in(cls)
}
"""Decisions by name, which is also the name of their entry points: `vsched.admission`."""
POLICY_TABLES = {table: name for name, one in DECISIONS.items() for table in one.tables}
"""Name of the decision of each policy table."""
KERNEL_TABLES = tuple(table for table, name in POLICY_TABLES.items() if DECISIONS[name].in_kernel)
"""The policy tables of decisions that the kernel makes."""
SEVERAL = "policy"
"""The table of one policy that makes several decisions with one state."""
TABLES = (*POLICY_TABLES, SEVERAL)


def decisions_of(cls: type[Policy]) -> list[str]:
    """Return the names of the decisions whose methods a class overrides."""
    return [
        name
        for name, decision in DECISIONS.items()
        if issubclass(cls, decision.base)
        and inspect.getattr_static(cls, decision.method)
        is not inspect.getattr_static(decision.base, decision.method)
    ]


def tables_of(cls: type[Policy]) -> list[str]:
    """Return the tables of the decisions whose methods a class overrides."""
    return [table for name in decisions_of(cls) for table in DECISIONS[name].tables]


def seats_in(path: str, table: Mapping[str, Any]) -> Sequence[str]:
    """Return the policy tables that the table at a path decides for: of the table `policy`, those in its `seats`."""
    seats: Sequence[str] = table["seats"] if path == SEVERAL else (path,)
    return seats


def without_seats(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table `policy` without `seats`: the name of a class, and its fields."""
    return {key: value for key, value in table.items() if key != "seats"}


def shares_policy(path: str, table: object) -> bool:
    """True for the table of a seat whose policy decides at several, as `Engine.policies` returns it."""
    seats = table.get("seats") if isinstance(table, Mapping) else None
    return isinstance(seats, list) and path in seats


def join_seats(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the tables of seats with a shared policy into one table `policy`; keep the others.

    Raises:
        ConfigError: On tables of two shared policies.
    """
    joined: dict[str, Any] = {}
    for path, table in tables.items():
        key = SEVERAL if shares_policy(path, table) else path
        if key in joined and joined[key] != table:
            raise ConfigError(
                f"{path}.seats: another policy for several seats is in this change. Remedy: change them one by one"
            )
        joined[key] = table
    return joined
