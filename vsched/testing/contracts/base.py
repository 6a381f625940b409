"""Shared parts of the contract suites: their error, and a comparison of objects with protocols."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from vsched.errors import VschedError


class ContractBroken(VschedError):
    """A worker violates its contract; the message names the requirement."""


def demand(condition: object, what: str) -> None:
    """Check one requirement of a contract.

    Raises:
        ContractBroken: When the condition does not hold.
    """
    if not condition:
        raise ContractBroken(what)


def demand_members(subject: object, protocol: type, *, who: str) -> None:
    """Check that an object has every method and attribute of a protocol, with the same arguments.

    Raises:
        ContractBroken: Names everything that is missing.
    """
    wrong = list(_differences(subject, protocol))
    source = f"{protocol.__module__}.{protocol.__qualname__}"
    demand(not wrong, f"{who} is not a {source}: {'; '.join(wrong)}")


def _differences(subject: object, protocol: type) -> Iterator[str]:
    for name in getattr(protocol, "__annotations__", {}):
        if not hasattr(subject, name):
            yield f"it has no attribute `{name}`"
    for name, wanted in vars(protocol).items():
        if name.startswith("_") or not (inspect.isfunction(wanted) or isinstance(wanted, property)):
            continue
        if isinstance(wanted, property):
            if not hasattr(subject, name):
                yield f"it has no attribute `{name}`"
            continue
        method = getattr(subject, name, None)
        if not callable(method):
            yield f"it has no method `{name}`"
        elif refused := _refused(method, wanted):
            yield f"its method `{name}` does not take {', '.join(f'`{one}`' for one in refused)}"


def _refused(method: object, wanted: object) -> list[str]:
    """Return the arguments of the protocol's method that another method does not accept."""
    assert callable(method)
    assert callable(wanted)
    try:
        taken = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # a method of an extension module
        return []
    kinds = {one.kind for one in taken}
    named = {one.name for one in taken if one.kind is not one.POSITIONAL_ONLY}
    places = sum(one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD} for one in taken)
    refused = []
    _, *parameters = inspect.signature(wanted).parameters.values()  # without self
    for place, one in enumerate(parameters):
        if one.kind is one.KEYWORD_ONLY:
            fits = one.name in named or one.VAR_KEYWORD in kinds
        elif one.kind is one.VAR_KEYWORD:
            fits = True
        else:
            fits = place < places or one.VAR_POSITIONAL in kinds
        if not fits:
            refused.append(one.name)
    return refused
