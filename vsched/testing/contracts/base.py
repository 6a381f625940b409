"""Shared parts of the contract suites."""

from __future__ import annotations

from vsched.errors import VschedError


class ContractBroken(VschedError):
    """A worker or a host violates its contract; the message names the requirement."""


def demand(condition: object, what: str) -> None:
    """Check one requirement of a contract.

    Raises:
        ContractBroken: When the condition does not hold.
    """
    if not condition:
        raise ContractBroken(what)
