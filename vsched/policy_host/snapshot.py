"""Snapshots: the state of a scheduler as bytes, and back.

Kernel objects declare in annotations which fields a snapshot has: `Saved` values and kernel objects, and `SavedKeys`
of objects that another object saves, such as requests. A snapshot is the tree of these fields by name, in MessagePack.
It names no class, and calls no code but the methods `state` and `restore` of the configured eviction orders.

A fresh scheduler with the same limits and policies takes the fields over; containers are filled in place, because
other objects may refer to them. Then `rebuild` of each object derives the rest: indices, sums and flags. Every other
field must be constant. A test compares all fields of a restored scheduler with those of the one that was saved.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec.msgpack import Decoder, decode, encode

from vsched.errors import RecordError

_Value = TypeVar("_Value")
Saved = Annotated[_Value, "saved"]
"""A field that a snapshot has, or a property with a setter."""
SavedKeys = Annotated[_Value, "keys"]
"""A dict, or a list of dicts, of which a snapshot has the keys in their order."""
LAYOUT = 4
"""Increases when snapshots change; a record says which layout it has."""


class SnapshotError(RecordError):
    """A recorded state cannot be restored."""


class Restorable:
    """A kernel object with fields that change."""

    def rebuild(self) -> None:
        """Derive the fields that a snapshot does not have, once all objects have the others."""


class SnapshotRoot(Restorable):
    """The object from which all others can be reached."""

    def saved_objects(self) -> Mapping[Any, object]:
        """Return by key the objects that `SavedKeys` can refer to."""
        raise NotImplementedError


AnyRoot = TypeVar("AnyRoot", bound=SnapshotRoot)


class _Field(NamedTuple):
    name: str
    keys_only: bool
    decoder: Decoder[Any]


def encode_snapshot(root: SnapshotRoot) -> bytes:
    """Return the state of an object between two events.

    Raises:
        RecordError: When the state of an eviction order cannot be recorded.
    """
    return encode(root, enc_hook=_pack)


def restore_snapshot(root: AnyRoot, data: bytes) -> AnyRoot:
    """Give a fresh object the state that `encode_snapshot` returned, and return the object.

    Raises:
        RecordError: When the bytes are no state of such an object.
    """
    restored: list[Restorable] = []
    links: list[tuple[dict[Any, object], Iterable[object]]] = []
    try:
        _fill(root, msgspec.Raw(data), restored, links)
        objects = root.saved_objects()
        for into, keys in links:
            into.update((key, objects[key]) for key in keys)
        for one in restored:
            one.rebuild()
    except RecordError:
        raise
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"the recorded state cannot be read: {type(error).__name__}: {error}"
        ) from error
    return root


def _fill(
    one: Restorable,
    data: msgspec.Raw,
    restored: list[Restorable],
    links: list[tuple[dict[Any, object], Iterable[object]]],
) -> None:
    """Set the fields of an object and of those below it, which come first in `restored`."""
    values = decode(data, type=dict[str, msgspec.Raw])
    for name, keys_only, decoder in _fields_of(one):
        value, current = values[name.lstrip("_")], getattr(one, name)
        if keys_only:
            links += zip(_dicts(current), decode(value), strict=True)
        elif isinstance(current, Restorable):
            _fill(current, value, restored, links)
        elif _has_parts(current):
            parts = decode(value, type=dict[str, msgspec.Raw])
            for key in {**current, **parts}:
                _fill(current[key], parts[key], restored, links)
        elif isinstance(current, dict):
            current.clear()
            current.update(decoder.decode(value))
        elif isinstance(current, list | deque):
            current.clear()
            current.extend(decoder.decode(value))
        else:
            setattr(one, name, decoder.decode(value))
    restored.append(one)


def _pack(one: object) -> object:
    if isinstance(one, array):
        return one.tobytes()
    if isinstance(one, deque):
        return list(one)
    if isinstance(one, Restorable):
        return {
            name.lstrip("_"): list(map(list, _dicts(value))) if keys_only else value
            for name, keys_only, _ in _fields_of(one)
            for value in (getattr(one, name),)
        }
    raise TypeError(f"{type(one).__qualname__} cannot be recorded")


def _unpack(kind: type, value: Any) -> Any:
    if kind is array and type(value) is bytes:
        return array("i", value)
    raise ValueError(f"a {kind.__qualname__} is not recorded")


def _fields_of(one: Restorable) -> list[_Field]:
    cls: Any = type(one)
    return _fields(cls)


@cache
def _fields(cls: Any) -> list[_Field]:
    hints = get_type_hints(cls, include_extras=True)
    for name in dir(cls):
        member = getattr(cls, name)
        if isinstance(member, property) and member.fset is not None:
            hints[name] = get_type_hints(member.fget, include_extras=True)["return"]
    fields = []
    for name, hint in hints.items():
        if get_origin(hint) is Annotated and hint.__metadata__[0] in ("saved", "keys"):
            kind = get_args(hint)[0]
            if get_origin(kind) is deque:
                kind = list[get_args(kind)[0]]  # type: ignore[misc]
            decoder = Decoder(kind, dec_hook=_unpack)
            fields.append(_Field(name, hint.__metadata__[0] == "keys", decoder))
    return fields


def _dicts(value: Any) -> list[dict[Any, object]]:
    return [value] if isinstance(value, dict) else value


def _has_parts(value: object) -> bool:
    return isinstance(value, dict) and isinstance(next(iter(value.values()), None), Restorable)
