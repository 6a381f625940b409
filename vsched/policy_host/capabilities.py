"""Capabilities of a host, and the refusal of policies that need others."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vsched.errors import PolicyError
from vsched.policy import Policy, RequestPolicy, tables_of
from vsched.policy.base import FEATURES


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
