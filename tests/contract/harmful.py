"""Policies that do harm: views that are changed by force or in good faith, odd answers, and exceptions of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast, get_args, get_type_hints

import msgspec

from vsched.policy import DECISIONS, Policy, decisions_of
from vsched.testing.cluster import SEATS, default_policies, seats_of

KINDS = sorted(kind for kind, decision in DECISIONS.items() if decision.remembers)
"""The kinds of policy whose method gets a view from the kernel."""

MUTABLE = (list, dict, set, deque, bytearray)
IMMUTABLE = (tuple, frozenset, bytes, MappingProxyType)
MUTATORS = {name for kind in MUTABLE for name in dir(kind) if not name.startswith("__")}
MUTATORS -= {name for kind in IMMUTABLE for name in dir(kind)}
MUTATORS |= {"__setitem__", "__delitem__"}
"""The methods of built-in containers that change them."""


def names_of(value: object) -> list[str]:
    """Return the names of all attributes of a value that are not Python's own."""
    return [name for name in dir(value) if not name.startswith("__")]


def reachable(view: object) -> list[object]:
    """Return all objects that a policy reaches from a view by public names, items and values; not its state."""
    found: list[object] = []
    seen: set[int] = set()
    state = getattr(view, "state", None)
    kept: list[object] = []  # or another value has the address of one that is gone

    def walk(value: object) -> None:
        plain = isinstance(value, int | float | str | bytes | type) or value is None
        if plain or value is state or callable(value) or id(value) in seen:
            return
        seen.add(id(value))
        kept.append(value)
        found.append(value)
        if isinstance(value, Mapping):
            for key, one in value.items():
                walk(key)
                walk(one)
        elif isinstance(value, msgspec.Struct) or not hasattr(value, "__iter__"):
            for name in names_of(value):
                if not name.startswith("_"):
                    walk(getattr(value, name))
        else:
            for one in itertools.islice(cast("Any", value), 3):
                walk(one)

    walk(view)
    return found


def changed_by(view: object) -> list[str]:
    """Try to change all attributes of the objects in a view; return the changes that succeed, and mutating methods."""
    done = []
    for value in reachable(view):
        ways = [f"has {name}" for name in MUTATORS if hasattr(value, name)]
        for name in [*names_of(value), "made_up"]:
            for change in (partial(setattr, value, name, 0), partial(delattr, value, name)):
                with contextlib.suppress(AttributeError, TypeError):
                    change()
                    ways.append(f"{change.func.__name__} {name}")
        done += [f"{type(value).__name__}: {way}" for way in ways]
    return done


def forced(view: object, choice: int, value: object) -> None:
    """Change one field of one object of a view past its protection, private ones included."""
    structs = [one for one in reachable(view) if isinstance(one, msgspec.Struct)]
    fields = [(one, name) for one in structs for name in one.__struct_fields__]
    one, name = fields[choice % len(fields)]
    msgspec.structs.force_setattr(one, name, value)


def wrapped(cls: type[Policy], around: Callable[[Callable[[Any], Any], Any], Any]) -> Policy:
    """Return a policy like `cls`, whose every call is `around(ask, view)`."""
    (kind,) = decisions_of(cls)
    name = DECISIONS[kind].method
    method = cast("Callable[[Policy, Any], Any]", getattr(cls, name))

    def ask(self: Policy, view: Any) -> Any:
        return around(lambda one: method(self, one), view)

    made = msgspec.defstruct(
        f"Harmful{cls.__name__}", [], bases=(cls,), namespace={name: ask}, frozen=True, kw_only=True
    )
    return cast("Policy", made())


def default_of(kind: str) -> type[Policy]:
    return type(default_policies().by_table[SEATS[seats_of(kind)[0]]])


def places(kind: str, policy: Policy) -> dict[str, Policy]:
    """Return a policy in all places of its kind."""
    return dict.fromkeys(seats_of(kind), policy)


def everywhere(around: Callable[[Callable[[Any], Any], Any], Any]) -> dict[str, Policy]:
    """Return the default policy of every kind, whose calls are `around(ask, view)`."""
    kinds = {kind: wrapped(default_of(kind), around) for kind in KINDS}
    return {place: policy for kind, policy in kinds.items() for place in seats_of(kind)}


def answers_of(kind: str) -> list[type[msgspec.Struct]]:
    """Return the structs that a policy of a kind may answer with."""
    decision = DECISIONS[kind]
    hint = get_type_hints(getattr(decision.base, decision.method))["return"]
    options = get_args(hint) or (hint,)
    return [one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)]


class Angry:
    """A value whose every method raises what no `except Exception` catches."""

    def _raise(self, *_: object) -> Any:
        raise SystemExit("angry")

    __getattr__ = __index__ = __iter__ = __len__ = __bool__ = __repr__ = __str__ = _raise
    __eq__ = __hash__ = __lt__ = _raise


class AngryError(BaseException):
    """An exception that cannot be worded."""

    def __str__(self) -> str:
        raise SystemExit("angry")

    __repr__ = __str__


def endless(value: object) -> Iterator[object]:
    while True:
        yield value


class Odd(NamedTuple):
    """A value that no policy may answer with, made anew for each call."""

    name: str
    make: Callable[[], object]


ODD = [
    Odd("None", lambda: None),
    Odd("an object", object),
    Odd("text", lambda: "youngest"),
    Odd("long text", lambda: "x" * 100_000),
    Odd("a negative", lambda: -1),
    Odd("a huge number", lambda: 10**400),
    Odd("64 bits", lambda: 2**63 - 1),
    Odd("a float", lambda: 0.5),
    Odd("NaN", lambda: math.nan),
    Odd("infinity", lambda: math.inf),
    Odd("a bool", lambda: True),
    Odd("an empty list", list),
    Odd("out of range", lambda: [99]),
    Odd("duplicates", lambda: [0, 0]),
    Odd("reversed", lambda: range(5, -1, -1)),
    Odd("a long range", lambda: range(10**12)),
    Odd("a long list", lambda: [0] * 100_000),
    Odd("NaN in a list", lambda: [math.nan]),
    Odd("a huge number in a list", lambda: [10**400]),
    Odd("a nested list", lambda: [[0]]),
    Odd("a set", lambda: {0}),
    Odd("a dictionary", lambda: {0: 0}),
    Odd("an endless generator", lambda: endless(0)),
    Odd("an angry value", Angry),
    Odd("angry values", lambda: [Angry()]),
    Odd("a class", lambda: Angry),
]


def recurse() -> None:
    recurse()


def throw(error: BaseException) -> None:
    raise error


RAISES: list[Callable[[], object]] = [
    lambda: throw(RuntimeError("a bug")),
    lambda: throw(SystemExit()),
    lambda: throw(SystemExit(0)),
    lambda: throw(KeyboardInterrupt()),
    lambda: throw(GeneratorExit()),
    lambda: throw(StopIteration()),
    lambda: throw(asyncio.CancelledError()),
    lambda: throw(ExceptionGroup("several", [ValueError(), KeyError()])),
    lambda: throw(AngryError()),
    recurse,
    lambda: bytearray(1 << 62),  # more memory than there can be
]
