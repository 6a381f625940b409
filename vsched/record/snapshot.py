"""The state of a kernel as plain values, and back.

A record must be replayable from the middle, so every segment of it begins with the whole state. The state is a graph:
a request stands in a slot, in a bucket and in a dictionary at the same time, and must be one object again afterwards.
So every object gets a number, and is written once; what refers to it holds the number.

This is no pickle: a state names no function and imports nothing. Decoding makes containers, objects by
`object.__new__`, with attributes set past every property, and msgspec structs by their constructors; all of classes
that are on a list (`AllowedClasses`). What is not on the list cannot be encoded either, so that a state that was
written can be read.

Layout: `[[class, attribute, …], …]`, the shapes; and `[[kind, …], …]`, the nodes, of which the first is the root. A
value inside a node is a plain one, or `[number]` for another node.
"""

from __future__ import annotations

import enum
import gc
import sys
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from vsched.errors import RecordError
from vsched.policy import EvictionPolicy, Policy

KERNEL_MODULES = ("vsched.kernel", "vsched.types", "vsched.policy")
PLAIN = frozenset({type(None), bool, int, float, str, bytes})
SKIPPED = frozenset({"__orig_class__"})
"""What `typing` hangs on an instance of a generic class."""


class SnapshotError(RecordError):
    """A state holds something that cannot be recorded, or a recorded state cannot be had again."""


class AllowedClasses:
    """The classes that a state may be made of: the kernel's, and those of the modules of the policies in force."""

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        """Allow the kernel's classes, and those of the modules of these policies and of their eviction orders."""
        self._modules = {type(policy).__module__ for policy in policies}
        for policy in policies:
            if isinstance(policy, EvictionPolicy):
                self._modules.add(type(_order_of(policy)).__module__)
        self._found: dict[str, type] = {}
        self._names: dict[type, str] = {}

    def allows(self, module: str) -> bool:
        """Return whether the classes of a module may be recorded."""
        return module in self._modules or any(
            module == name or module.startswith(f"{name}.") for name in KERNEL_MODULES
        )

    def name(self, cls: type) -> str:
        """Return the name that a class is recorded under.

        Raises:
            SnapshotError: When it may not be recorded.
        """
        known = self._names.get(cls)
        if known is None:
            known = f"{cls.__module__}:{cls.__qualname__}"
            if self.find(known) is not cls:
                raise SnapshotError(f"{known}: another class has this name")
            self._names[cls] = known
        return known

    def find(self, name: str) -> type:
        """Return the class of a recorded name.

        Raises:
            SnapshotError: When it is not on the list, or is none.
        """
        found = self._found.get(name)
        if found is not None:
            return found
        module, _, path = name.partition(":")
        if not self.allows(module):
            raise SnapshotError(
                f"{name}: not a class of the kernel, nor of the module of a policy in force"
            )
        target: Any = sys.modules.get(module)  # nothing is imported for a name in a file
        for part in path.split("."):
            target = getattr(target, part, None)
        if not isinstance(target, type) or (target.__module__, target.__qualname__) != (
            module,
            path,
        ):
            raise SnapshotError(f"{name}: no class of this module")
        if not _is_recordable(target):
            raise SnapshotError(f"{name}: neither a struct, nor an enum, nor a plain class")
        self._found[name] = target
        return target


def _order_of(policy: EvictionPolicy) -> object:
    try:
        return policy.build_order()
    except Exception:  # noqa: BLE001 - a user's class may raise anything; the kernel reports it
        return policy


def _is_recordable(cls: type) -> bool:
    if issubclass(cls, msgspec.Struct | enum.Enum):
        return True
    return cls.__new__ is object.__new__ and not issubclass(cls, type)


def encode_state(root: object, classes: AllowedClasses) -> bytes:
    """Return the bytes of an object and of all that it refers to.

    Raises:
        SnapshotError: When something in it cannot be recorded; it says what and where.
    """
    collecting = gc.isenabled()
    gc.disable()  # it would look through a hundred thousand new tuples, more than once, for nothing
    try:
        return _Encoder(classes).encode(root)
    finally:
        if collecting:
            gc.enable()


class _Encoder:
    """Refers to nothing that refers to it, so that its many tuples go without the garbage collector."""

    def __init__(self, classes: AllowedClasses) -> None:
        self._classes = classes
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []
        """Held, or an address could be used twice."""
        self._owners: list[int] = []
        """For each of them, the number of the first that referred to it."""
        self._at = 0
        self._shapes: dict[tuple[str, ...], int] = {}
        self._slots: dict[type, tuple[str, ...]] = {}
        self._nodes: list[tuple[Any, ...]] = []

    def encode(self, root: object) -> bytes:
        self._number(root)
        while self._at < len(self._objects):  # it grows meanwhile
            try:
                self._nodes.append(self._node(self._objects[self._at]))
            except SnapshotError as error:
                raise SnapshotError(f"{error} (in {self._place()})") from None
            self._at += 1
        try:
            return msgspec.msgpack.encode((list(self._shapes), self._nodes))
        except OverflowError as error:
            raise SnapshotError(f"a whole number of over 64 bits: {error}") from error

    def _number(self, one: Any) -> int:
        number = self._numbers.get(id(one))
        if number is None:
            number = self._numbers[id(one)] = len(self._objects)
            self._objects.append(one)
            self._owners.append(self._at)
        return number

    def _place(self) -> str:
        """Return the class of the object that holds what is being written."""
        number = self._owners[self._at]
        while number and type(self._objects[number]) in _CONTAINERS:
            number = self._owners[number]
        return type(self._objects[number]).__qualname__

    def _value(self, one: Any) -> Any:
        return one if type(one) in PLAIN else (self._number(one),)

    def values(self, many: Iterable[Any]) -> list[Any]:
        if PLAIN.issuperset(map(type, many)):
            return many if type(many) is list else list(many)
        return [self._value(one) for one in many]

    def keys(self, many: Iterable[Any]) -> list[Any]:
        for one in many:
            if not _is_key(one):
                raise SnapshotError(f"{type(one).__qualname__} as a key")
        return self.values(many)

    def _node(self, one: Any) -> tuple[Any, ...]:
        cls = type(one)
        container = _CONTAINERS.get(cls)
        if container is not None:
            return container(self, one)
        name = self._classes.name(cls)
        if isinstance(one, enum.Enum):
            return ("enum", name, one.name)
        if isinstance(one, msgspec.Struct):
            return (
                "struct",
                self._shape(name, one.__struct_fields__),
                self.values(msgspec.structs.astuple(one)),
            )
        present = {name: getattr(one, name) for name in self._slot_names(cls) if hasattr(one, name)}
        present.update(getattr(one, "__dict__", {}))
        for skipped in SKIPPED:
            present.pop(skipped, None)
        return ("object", self._shape(name, present), self.values(present.values()))

    def _shape(self, name: str, attributes: Iterable[str]) -> int:
        return self._shapes.setdefault((name, *attributes), len(self._shapes))

    def _slot_names(self, cls: type) -> tuple[str, ...]:
        known = self._slots.get(cls)
        if known is None:
            known = self._slots[cls] = tuple(_slots(cls))
        return known


_CONTAINERS: dict[type, Callable[[_Encoder, Any], tuple[Any, ...]]] = {
    list: lambda to, one: ("list", to.values(one)),
    tuple: lambda to, one: ("tuple", to.values(one)),
    set: lambda to, one: ("set", to.keys(_sorted(one))),
    frozenset: lambda to, one: ("frozenset", to.keys(_sorted(one))),
    dict: lambda to, one: ("dict", to.keys(one), to.values(one.values())),
    OrderedDict: lambda to, one: ("ordered", to.keys(one), to.values(one.values())),
    deque: lambda to, one: ("deque", to.values(one), one.maxlen),
    array: lambda to, one: ("array", one.typecode, one.tobytes()),
    range: lambda to, one: ("range", one.start, one.stop, one.step),
}


def _slots(cls: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class and its bases, by name."""
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    }


def _sorted(many: Iterable[Any]) -> list[Any]:
    """Return the members of a set in an order of their own where they have one."""
    members = list(many)
    kinds = set(map(type, members))
    return sorted(members) if len(kinds) == 1 and kinds <= {int, str, bytes} else members


def _is_key(one: Any) -> bool:
    """Return whether something can be a key without a call of code that is not Python's or msgspec's own."""
    cls: Any = type(one)
    if cls in PLAIN or isinstance(one, enum.Enum):
        return True
    if cls in (tuple, frozenset):
        return all(map(_is_key, one))
    own = cls.__hash__ is object.__hash__ and cls.__eq__ is object.__eq__
    return own or (isinstance(one, msgspec.Struct) and cls.__hash__ is msgspec.Struct.__hash__)


def decode_state(data: bytes, classes: AllowedClasses) -> Any:
    """Return the object that `encode_state` has written.

    Raises:
        SnapshotError: When the bytes are no state, or name a class that is not allowed.
    """
    try:
        shapes, nodes = msgspec.msgpack.decode(data, type=tuple[list[list[str]], list[list[Any]]])
        return _Decoder(shapes, nodes, classes).decode()
    except SnapshotError:
        raise
    except RecursionError:
        raise SnapshotError("the recorded state is nested too deeply") from None
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(
            f"the recorded state cannot be read: {type(error).__name__}: {error}"
        ) from error


class _Decoder:
    """Makes what can change empty and fills it later, so that circles close; the rest is made whole."""

    def __init__(
        self, shapes: list[list[str]], nodes: list[list[Any]], classes: AllowedClasses
    ) -> None:
        self._shapes = [(classes.find(name), attributes) for name, *attributes in shapes]
        self._slots = [_slots(cls) for cls, _ in self._shapes]
        self._nodes = nodes
        self._classes = classes
        self._made: dict[int, Any] = {}
        self._open: list[tuple[Any, list[Any]]] = []

    def decode(self) -> Any:
        root = self._object(0)
        keyed: list[tuple[Any, list[Any]]] = []
        while self._open:
            one, node = self._open.pop()
            match node[0]:
                case "list" | "deque":
                    one.extend(self._values(node[1]))
                case "object":
                    self._fill(one, node[1], self._values(node[2]))
                case _:
                    keyed.append((one, [self._values(part) for part in node[1:]]))
        for one, parts in keyed:  # last: by now every key is whole
            if not all(map(_is_key, parts[0])):
                raise SnapshotError("a key that would call code")
            one.update(parts[0] if isinstance(one, set) else zip(*parts, strict=True))
        return root

    def _values(self, many: Sequence[Any]) -> list[Any]:
        if PLAIN.issuperset(map(type, many)):
            return list(many)
        return [self._object(one[0]) if type(one) is list else one for one in many]

    def _object(self, number: int) -> Any:
        if number not in self._made:
            if not 0 <= number < len(self._nodes):
                raise SnapshotError(f"node {number} does not exist")
            self._made[number] = self._make(self._nodes[number])
        return self._made[number]

    def _make(self, node: list[Any]) -> Any:
        match node:
            case ["tuple", values]:
                return tuple(self._values(values))
            case ["frozenset", values]:
                return frozenset(self._values(values))
            case ["array", str(typecode), bytes(data)]:
                return array(typecode, data)
            case ["range", int(start), int(stop), int(step)]:
                return range(start, stop, step)
            case ["enum", str(name), str(member)]:
                cls = self._classes.find(name)
                if not issubclass(cls, enum.Enum):
                    raise SnapshotError(f"{name}: no enum")
                return cls[member]
            case ["struct", int(shape), values]:
                cls, names = self._shapes[shape]
                if not issubclass(cls, msgspec.Struct):
                    raise SnapshotError(f"{cls.__qualname__}: no struct")
                return cls(**dict(zip(names, self._values(values), strict=True)))
        empty = self._empty(node)
        self._open.append((empty, node))
        return empty

    def _empty(self, node: list[Any]) -> Any:
        match node:
            case ["object", int(shape), _]:
                cls, _ = self._shapes[shape]
                if issubclass(cls, msgspec.Struct | enum.Enum):
                    raise SnapshotError(f"{cls.__qualname__}: no plain class")
                return object.__new__(cls)
            case ["deque", _, maxlen]:
                return deque(maxlen=maxlen)
            case ["list", _]:
                return []
            case ["set", _]:
                return set()
            case ["dict", _, _]:
                return {}
            case ["ordered", _, _]:
                return OrderedDict()
        raise SnapshotError(f"a node of kind {node[:1]}")

    def _fill(self, one: Any, shape: int, values: list[Any]) -> None:
        """Set attributes as they were, past properties and `__setattr__`."""
        _, names = self._shapes[shape]
        slots = self._slots[shape]
        for name, value in zip(names, values, strict=True):
            slot = slots.get(name)
            if slot is not None:
                slot.__set__(one, value)
            else:
                one.__dict__[name] = value
