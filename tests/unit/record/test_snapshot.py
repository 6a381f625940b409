"""G1: the state of a kernel is data: whole again afterwards, and nothing in it is called."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict, deque
from typing import Any

import msgspec
import pytest

from tests.unit.record.odd_policies import Colour, Hashed, Link, Ring, RingOrder, Trap
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.request import Phase
from vsched.record.snapshot import AllowedClasses, SnapshotError, decode_state, encode_state
from vsched.testing.defaults import default_policies
from vsched.types import Extent, FinishReason

CLASSES = AllowedClasses([Ring()])


def again(one: Any) -> Any:
    return decode_state(encode_state(one, CLASSES), CLASSES)


def test_snapshot_keeps_values_and_types() -> None:
    state = {
        "plain": [None, True, 1, -(2**63), 2**64 - 1, 1.5, float("inf"), "text", b"bytes"],
        "tuple": (1, (2, [3])),
        "sets": [{3, 1, 2}, frozenset({(1, b"x")})],
        "array": array("i", [1, -1]),
        "range": range(1, 9, 2),
        "deque": deque([1, 2], maxlen=2),
        "ordered": OrderedDict([("b", 1), ("a", [2])]),
        "enums": [Phase.READY, FinishReason.STOP, Colour.BLUE],
        "struct": Extent(1, 2),
        "keys": {(1, "a"): 1, Phase.READY: 2, Extent(1, 2): 3},
    }
    back = again(state)
    assert back == state
    assert repr(back) == repr(state)
    assert back["deque"].maxlen == 2
    assert type(back["ordered"]) is OrderedDict
    assert back["enums"][0] is Phase.READY


def test_snapshot_keeps_identities_and_circles() -> None:
    shared: list[Any] = []
    ring: dict[str, Any] = {"shared": (shared, shared)}
    shared.append(ring)
    back = again(ring)
    first, second = back["shared"]
    assert first is second
    assert first[0] is back


def test_snapshot_keeps_objects_of_any_shape() -> None:
    order = RingOrder()
    for key in (b"a", b"b", b"c", b"d", b"e"):
        order.add(key, 1)
    order.drop(b"b")
    back = again(order)
    assert back is not order
    assert back.me is back
    assert [back.victim(), list(back), list(back.seen)] == [
        order.victim(),
        list(order),
        list(order.seen),
    ]
    walked, link = [], back.head.after
    while link is not back.head:
        walked.append(link.key)
        assert link is back.links[link.key]
        assert link.secret == (link.key, 1)
        link = link.after
    assert walked == [b"a", b"c", b"d", b"e"]


def test_snapshot_of_a_long_chain_needs_no_recursion() -> None:
    first = Link(0)
    for number in range(1, 5000):
        link = Link(number)
        first.before, link.after = link, first
        first = link
    back = again(first)
    assert (back.key, back.after.key) == (4999, 4998)


def test_snapshot_of_a_kernel_keeps_every_part_of_it() -> None:
    kernel = Scheduler(
        SchedulerLimits(blocks=8, slots=2, context_tokens=64, pages=4), default_policies()
    )
    classes = AllowedClasses(msgspec.structs.astuple(default_policies()))
    first = encode_state(kernel, classes)
    assert encode_state(decode_state(first, classes), classes) == first


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ([1, lambda: 1], "function"),
        ({"a": threading.Lock()}, "lock"),
        ([2**70], "64 bits"),
        ([RecursionError()], "RecursionError"),
        ({Hashed(): 1}, "Hashed as a key"),
        ([print], "builtin"),
        ([int], "type"),
    ],
)
def test_snapshot_says_what_it_cannot_take(one: object, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        encode_state(one, CLASSES)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "builtins:object",
        "builtins:eval",
        "vsched.engine:Engine",
        "vsched.kernelx:Scheduler",
        "vsched.kernel.generate.step_budget:math",
        "vsched.kernel.request:array",
        "vsched.kernel.nothing:Here",
        "vsched.kernel.scheduler:Scheduler.handle",
        "tests.unit.record.odd_policies:threading.Thread",
        "tests.unit.record.test_snapshot:again",
        "",
    ],
)
@pytest.mark.parametrize("kind", ["object", "struct", "enum"])
def test_snapshot_refuses_a_forged_class(name: str, kind: str) -> None:
    """G1: only classes on the list are made, whatever a file says."""
    node = [kind, name, "x"] if kind == "enum" else [kind, 0, [1]]
    forged = msgspec.msgpack.encode(([[name, "args"]], [node]))
    with pytest.raises(SnapshotError):
        decode_state(forged, CLASSES)


def test_snapshot_runs_no_code_of_a_class() -> None:
    """G1: no constructor, no property, no hash."""
    name = f"{Trap.__module__}:Trap"
    made = msgspec.msgpack.encode(([[name, "guarded"]], [["object", 0, [7]]]))
    assert vars(decode_state(made, CLASSES)) == {"guarded": 7}
    keyed = msgspec.msgpack.encode(([[name]], [["dict", [[1]], [1]], ["object", 0, []]]))
    with pytest.raises(SnapshotError, match="would call code"):
        decode_state(keyed, CLASSES)


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [["list", [[5]]]],
        [["list", [[-1]]]],
        [["list"]],
        [["nothing", 1]],
        [[]],
        [["object", 3, []]],
        [["object", 0, []]],
        [["struct", 0, [1, 2]]],
        [["tuple", [[0]]]],
        [["array", "u", b"123"]],
        [["range", 0, 1, 0]],
        [["dict", [1, 2], [1]]],
        [["dict", [[1]], [1]], ["list", []]],
    ],
)
def test_snapshot_refuses_what_is_malformed(nodes: list[Any]) -> None:
    shapes = [["vsched.types:Extent", "offset"]]
    with pytest.raises(SnapshotError):
        decode_state(msgspec.msgpack.encode((shapes, nodes)), CLASSES)
