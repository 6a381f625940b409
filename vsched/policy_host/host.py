"""A host: its capabilities, and its seats with timing, replacement of slow policies, notices and figures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vsched.errors import PolicyError
from vsched.policy import Policy, RequestPolicy, tables_of
from vsched.policy.base import FEATURES
from vsched.policy_host.call_times import PolicyTimes, QueueClock
from vsched.policy_host.seats import PolicySeat, PolicySeats, SeatPolicies


class PolicyHost:
    """Seats for policy tables, by their paths.

    Attributes:
        seats: All seats, and the failures of their policies.
        switched_off: Reasons why tables have no seat although a policy is configured.
        faults: Number of failures of the host's own code around policies, by activity.
    """

    def __init__(
        self,
        policies: SeatPolicies,
        *,
        now_ns: Callable[[], int],
        log: logging.Logger,
        budget_ms: float = 0.0,
        slow_max: int = 0,
        switched_off: Mapping[str, str] | None = None,
    ) -> None:
        """Create the seats; a policy is replaced after more than `slow_max` of 100 calls over `budget_ms`."""
        self.seats = PolicySeats(policies)
        self.switched_off = dict(switched_off or {})
        self.faults: dict[str, int] = {}
        self._log = log
        self._times = PolicyTimes(
            budget_ms=budget_ms,
            slow_max=slow_max,
            now_ns=now_ns,
            replace=self._replace,
            queued_ns=QueueClock(),
        )
        self._by_table: dict[str, PolicySeat] = {}
        for table, policy in policies.by_table.items():
            if table in self.switched_off:
                log.warning("%s: no policy decides: %s", table, self.switched_off[table])
            else:
                self._by_table[table] = self.seats.add_seat(table)
                log.info("%s: %r", table, policy)
        self.seats.watch(self._times.watch)

    def seat(self, table: str) -> PolicySeat | None:
        """Return the seat of a table; None if no policy decides there."""
        return self._by_table.get(table)

    def guard(self, doing: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call code of the host around a policy; after an exception, log the first, count it, and return None."""
        try:
            return call(*args)
        except Exception:  # noqa: BLE001 - the host goes on without the policy
            if doing not in self.faults:
                self._log.exception("%s failed; the default decides", doing)
            self.faults[doing] = self.faults.get(doing, 0) + 1
            return None

    def log_notices(self) -> None:
        """Log the failures of policies since this was last called."""
        for notice in self.seats.faults.take_notices():
            self._log.warning("%s", notice)

    def figures(self) -> dict[str, Any]:
        """Return the figures of all seats."""
        return {
            "policy_calls": self._times.statistics(),
            "policy_faults": dict(self.seats.faults.counts),
            "policy_overruled": self.seats.overruled(),
            "policy_replaced": self.seats.replaced(),
            "switched_off": self.switched_off,
            "host_faults": dict(self.faults),
        }

    def _replace(self, name: str, reason: str) -> None:
        if self.seats.replace(name, reason):
            self._log.warning("the default decides from now on as %s: %s", name, reason)


class HostCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions and the features that a host gives its policies.

    Attributes:
        host: Name and version of the host, for messages.
        tables: Policy tables that it has seats for.
        refused: The other tables, with the reason, a clause.
        features: The features of `vsched.policy.base.FEATURES` that it has.
    """

    host: str
    tables: frozenset[str]
    refused: Mapping[str, str] = {}
    features: frozenset[str] = frozenset(FEATURES)


def check_table(table: str, capabilities: HostCapabilities, policy: Policy | None = None) -> None:
    """Refuse a policy table that this host has no seat for.

    Raises:
        PolicyError: With the table, the reason, and the remedy.
    """
    host = capabilities.host
    if table not in capabilities.tables:
        reason = capabilities.refused.get(table, f"{host} makes this decision itself")
        able = capabilities.tables & {*tables_of(type(policy))} if policy is not None else ()
        others = f", or use {type(policy).__name__} in {', '.join(sorted(able))}" if able else ""
        raise PolicyError(
            f"{table}: not decided by a policy in {host}: {reason}. Remedy: leave the table out{others}"
        )


def check_capabilities(policy: Policy, table: str, capabilities: HostCapabilities) -> None:
    """Refuse a policy that this host cannot follow in this table.

    Raises:
        PolicyError: With the table, the reason, and the remedy.
    """
    check_table(table, capabilities, policy)
    host, name = capabilities.host, type(policy).__name__
    needed = list(policy.needs())
    if isinstance(policy, RequestPolicy) and policy.preempts and table == "generate.admission":
        needed.append("preempt")
    for feature in needed:
        if feature not in FEATURES:
            raise PolicyError(
                f"{table}: {name} needs {feature!r}, which is none of {', '.join(FEATURES)}"
            )
        if feature not in capabilities.features:
            raise PolicyError(
                f"{table}: {name} needs {FEATURES[feature]} ({feature}), which {host} does not have. "
                "Remedy: change its fields, or use another policy"
            )
