"""The encode stage: selection, order and dispatch of items, and failures."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest

from tests.unit.kernel.policy_pool import AllWaiting, Reversed
from tests.unit.kernel.setups import (
    answering,
    assert_holds_nothing,
    assert_served,
    complete,
    encode_statistics,
    image_request,
    joined,
    make_cluster,
    words,
)
from vsched.failures import EncodeErrorKind
from vsched.policy import Admission, AdmissionView, Dispatch
from vsched.testing import ModelCluster, make_request
from vsched.types import Extent, FinishReason
from vsched_policies.admission import TokenBudget


class Watching(TokenBudget, frozen=True, kw_only=True):
    """A token budget that records the queues it sees."""

    queues: ClassVar[list[list[int | None]]] = []

    def admit(self, view: AdmissionView) -> Admission:
        self.queues.append([entry.tokens for entry in view.waiting])
        return TokenBudget.admit(self, view)


@pytest.mark.parametrize(
    ("images", "budget", "permits", "batches"),
    [
        ([100, 500, 100], 200, 8, [[100], [500], [100]]),
        ([10] * 5, 35, 2, [[10, 10], [10, 10], [10]]),  # the count binds first
        ([10] * 5, 25, 4, [[10, 10], [10, 10], [10]]),
    ],
)
def test_encode_refused_items_keep_the_front(
    images: list[int], budget: int, permits: int, batches: list[list[int]]
) -> None:
    Watching.queues.clear()
    cluster = make_cluster(encode_items=permits, encode_admission=Watching(max_tokens=budget))
    tokens = {b"image%d" % index: count for index, count in enumerate(images)}
    complete(cluster, image_request("r", *tokens.items()))
    assert [[tokens[key] for key in batch] for batch in cluster.encoded] == batches
    remaining = list(images)
    for batch, queue in zip(batches, Watching.queues, strict=True):
        assert queue == remaining
        remaining = remaining[len(batch) :]
    assert_served(cluster, "r")


TWO_EACH = {"encoders": 2, "generators": 2, "step_target_ns": 50_000_000}


@pytest.mark.parametrize("together", [True, False])
def test_encode_next_to_decodes_may_keep_them_for_as_long_as_prefill_may(*, together: bool) -> None:
    """Decodes of the encode group's own generate group count, and only if the two share their processes."""
    cluster = make_cluster(encode_pauses=together, **TWO_EACH)
    cluster.submit(image_request("first", (b"a", 8)))
    (first,) = [log[0].time_slice_ns for log in cluster.encode_logs.values() if log]
    assert first == (50_000_000 if together else 0), "a request may start to wait"
    cluster.drain()
    cluster.submit(make_request("text", words(5), max_tokens=100))
    (home,) = cluster.busy("generate")
    stage = next(one for one in cluster.kernel.generators if one.name == home)
    stage.step_times.note_step(1000, 1)
    stage.step_times.learn(1000, 10_000_000)
    cluster.run_generate(home)
    cluster.run_generate(home)
    slow_ns = stage.step_times.left_ns(1)
    assert slow_ns > 60_000_000
    for key in (b"b", b"c"):
        cluster.submit(image_request(key.decode(), (key, 8)))
    found = {name: log[0].time_slice_ns for name, log in cluster.encode_logs.items() if log}
    assert len(found) == 2
    for name, time_slice_ns in found.items():
        beside = name.partition("-")[2] == home.partition("-")[2]
        limit_ns = (slow_ns if beside else 50_000_000) if together else 0
        assert time_slice_ns == pytest.approx(limit_ns, rel=0.001)


@pytest.mark.parametrize("together", [True, False])
def test_encode_goes_to_the_group_that_holds_up_the_fewest(*, together: bool) -> None:
    """If two encode groups are free, the one whose processes have the fewest decoding requests encodes."""
    cluster = make_cluster(encode_pauses=together, **TWO_EACH)
    for name, tokens in (("long", 30), ("short", 1), ("longer", 30)):  # the groups take turns
        cluster.submit(make_request(name, words(5), max_tokens=tokens))
    while "short" not in cluster.ended:
        cluster.run_generate("generate-1")
    cluster.run_generate("generate-0")
    cluster.submit(image_request("r", (b"a", 8)))
    assert cluster.busy("encode") == ["encode-1" if together else "encode-0"]
    assert_served(cluster, "long", "short", "longer", "r")


def test_encode_default_budget_is_that_of_a_generate_step() -> None:
    """Not the chunk size, nor a number of its own."""
    for budget, batches in ((30, [[b"a", b"b", b"c"]]), (29, [[b"a", b"b"], [b"c"]])):
        limits = {"batch_tokens": budget, "chunk_tokens": 12}
        cluster = make_cluster(**limits, encode_admission=TokenBudget())
        cluster.lose("encode")
        for name in ("a", "b", "c"):
            cluster.submit(image_request(name, (name.encode(), 10)))
        cluster.restore_group("encode")
        cluster.drain()
        assert cluster.encoded == batches


def test_encode_newcomers_stand_behind_refused_items() -> None:
    cluster = make_cluster(encode_admission=TokenBudget(max_tokens=200))
    cluster.submit(image_request("old", (b"a", 100), (b"b", 500), (b"c", 100)))
    complete(cluster, image_request("young", (b"d", 50)))
    assert cluster.encoded == [[b"a"], [b"b"], [b"c", b"d"]]


def test_encode_same_image_of_many_requests_is_one_task() -> None:
    """Misses are deduplicated by key and returned to all, in request order."""
    cluster = make_cluster(image_request("busy", (b"other", 8)))
    for name in ("r1", "r2", "r3"):
        cluster.submit(image_request(name, (b"same", 20), (b"own of " + name.encode(), 4)))
    cluster.drain()
    assert cluster.encoded == [[b"other"], [b"same", b"own of r1", b"own of r2", b"own of r3"]]
    assert joined(cluster) == ["busy", "r1", "r2", "r3"]
    assert_served(cluster, "r1", "r2", "r3")


@pytest.mark.parametrize("encoded", [False, True])
def test_encode_length_mismatch_fails_that_request(encoded: bool) -> None:
    """An entry in use is never trimmed; the request with the other length fails, the first goes on."""
    cluster = make_cluster(slots=1, generate_depth=1)
    cluster.submit(make_request("running", words(3), max_tokens=2))
    cluster.submit(image_request("right", (b"a", 10)))
    if encoded:
        cluster.run_encode()
    cluster.submit(image_request("wrong", (b"a", 12)))
    finish = cluster.ended["wrong"]
    assert (finish.reason, finish.code) == (FinishReason.ERROR, "length_mismatch")
    assert "token count" in finish.message
    assert_served(cluster, "running", "right")


def test_encode_length_mismatch_within_a_request_fails_it() -> None:
    """One content cannot have two lengths in one prompt."""
    cluster = make_cluster(image_request("r", (b"a", 10), (b"a", 12)))
    cluster.drain()
    assert cluster.ended["r"].code == "length_mismatch"
    assert_holds_nothing(cluster)


def test_encode_brought_embeddings_cost_the_encoder_nothing() -> None:
    """Copied along with the raw items of a step, outside of its budget, and cached like them."""
    cluster = make_cluster(encode_admission=TokenBudget(max_tokens=20))
    items = [(0, 50, b"brought"), (1, 20, b"raw"), (2, 60, b"brought too")]
    cluster.submit(make_request("r", words(3), items, encoded=[b"brought", b"brought too"]))
    assert [task.encoded for task in cluster.encode_logs["encode"][0].tasks] == [True, False, True]
    cluster.drain()
    complete(cluster, make_request("again", words(3, start=50), items, encoded=[b"brought"]))
    assert cluster.encoded == [[b"brought", b"raw", b"brought too"]]
    statistics = encode_statistics(cluster)
    assert (statistics["items_encoded"], statistics["tokens_encoded"]) == (1, 20)
    assert statistics["items_copied"] == 2
    assert_served(cluster, "r", "again")


@pytest.mark.parametrize("broken", [b"a", b"b", b"c"])
def test_encode_failing_item_is_isolated(broken: bytes) -> None:
    """A failed batch is halved until the broken item is alone, and only its requests fail. It may be sent again."""
    cluster = make_cluster(image_request("busy", (b"other", 4)))
    users = {b"a": ["r1", "r4"], b"b": ["r2"], b"c": ["r3"]}
    for name, key in (("r1", b"a"), ("r2", b"b"), ("r3", b"c"), ("r4", b"a")):
        cluster.submit(image_request(name, (key, 10)))
    while cluster.busy("encode"):
        poisoned = any(task.key == broken for task in cluster.encode_logs["encode"][0].tasks)
        cluster.run_encode(fail=EncodeErrorKind.FAILED if poisoned else None)
    assert cluster.encoded[1] == [b"a", b"b", b"c"]
    assert cluster.encoded[2] == [b"a", b"b"], "failed items returned to the front in order"
    assert [broken] in cluster.encoded
    for name in users.pop(broken):
        finish = cluster.ended[name]
        assert (finish.reason, finish.code) == (FinishReason.ERROR, "encode_failed")
        assert finish.message == "the image could not be encoded"
    complete(cluster, image_request("again", (broken, 10)))
    assert_served(cluster, "busy", "again", *(name for names in users.values() for name in names))


def test_encode_policy_chooses_which_suspect_is_next() -> None:
    cluster = make_cluster(image_request("busy", (b"other", 4)), encode_admission=Reversed())
    cluster.submit(image_request("r", (b"a", 4), (b"b", 4)))
    cluster.run_encode()
    cluster.run_encode(fail=EncodeErrorKind.FAILED)
    cluster.drain()
    assert cluster.encoded == [[b"other"], [b"b", b"a"], [b"b"], [b"a"]]
    assert_served(cluster, "busy", "r")


def test_encode_suspects_run_alone() -> None:
    """Whatever the policy chooses, suspected items run alone, and others without them."""
    cluster = make_cluster(chunk_tokens=8, block_size=4, encode_admission=AllWaiting())
    cluster.submit(make_request("older", words(40), [(30, 4, b"late")]))
    cluster.submit(image_request("younger", (b"a", 4), (b"b", 4)))
    while not cluster.encoded:
        cluster.run_generate()
    while not cluster.kernel.embeddings.queue:
        cluster.run_generate()
    cluster.run_encode(fail=EncodeErrorKind.FAILED)
    cluster.drain()
    assert cluster.encoded[0] == [b"a", b"b"]
    assert cluster.encoded[1:] == [[b"late"], [b"a"], [b"b"]]
    assert_served(cluster, "older", "younger")


def test_encode_items_of_a_failed_batch_have_no_known_size() -> None:
    """A policy sees None for them, never a number, and they run alone. Once encoded, they are like others."""
    Watching.queues.clear()
    cluster = make_cluster(encode_admission=Watching(max_tokens=200))
    cluster.submit(image_request("r", (b"a", 10), (b"b", 20)))
    cluster.run_encode(fail=EncodeErrorKind.OUT_OF_MEMORY)
    cluster.drain()
    assert Watching.queues == [[10, 20], [None, None], [None]]
    assert cluster.encoded == [[b"a", b"b"], [b"a"], [b"b"]]
    assert [entry.tokens for entry in cluster.kernel.embeddings] == [10, 20], "known again"


def test_unneeded_encode_result_is_discarded() -> None:
    """Pixels of an aborted request may be overwritten while they are encoded, so the result is not kept."""
    cluster = make_cluster(image_request("r1", (b"a", 10)))
    cluster.abort("r1")
    cluster.run_encode()
    statistics = encode_statistics(cluster)
    names = ("cache_entries", "items_encoded", "tokens_encoded")
    assert [statistics[name] for name in names] == [0, 0, 0]
    complete(cluster, image_request("r2", (b"a", 10)))
    assert cluster.encoded == [[b"a"], [b"a"]]
    assert_served(cluster, "r2")


def test_encode_task_carries_the_pixels_of_a_live_user() -> None:
    """The pixels of a request that left are gone; the task names those of a live one."""
    cluster = make_cluster(image_request("busy", (b"other", 4)))
    first = image_request("r1", (b"a", 10))
    second = image_request("r2", (b"a", 10))
    moved = msgspec.structs.replace(second.items[0], extent=Extent(4096, 16))
    second = msgspec.structs.replace(second, items=(moved,))
    cluster.submit(first)
    cluster.submit(second)
    cluster.abort("r1")
    cluster.run_encode()
    assert cluster.encode_logs["encode"][0].tasks[0].extent.offset == 4096


VIEWS: list[Any] = []
WAITING: list[list[int]] = []


def last_group(view: Any) -> Dispatch:
    """The last free group, and all images; records its views."""
    VIEWS.append(view)
    WAITING.append([entry.tokens for entry in view.waiting])
    return Dispatch(max(index for index, group in enumerate(view.groups) if group.free))


LAST_GROUP = answering("dispatch", last_group)


def behind(view: Any) -> Dispatch:
    """Never the front while there is another, otherwise nothing while something is encoded."""
    free = next(index for index, group in enumerate(view.groups) if group.free)
    if len(view.waiting) > 1:
        return Dispatch(free, range(1, len(view.waiting)))
    return Dispatch(None if any(group.items for group in view.groups) else free)


@pytest.fixture(autouse=True)
def _fresh_views() -> None:
    VIEWS.clear()
    WAITING.clear()


def out(cluster: ModelCluster) -> dict[str, list[bytes]]:
    return {
        name: [task.key for decision in log for task in decision.tasks]
        for name, log in cluster.encode_logs.items()
    }


def test_dispatch_policy_names_the_group_and_sees_the_state_of_groups() -> None:
    cluster = make_cluster(encoders=2, encode_items=1, dispatch=LAST_GROUP)
    cluster.submit(image_request("r", (b"a", 8), (b"b", 12)))
    assert out(cluster) == {"encode-0": [b"b"], "encode-1": [b"a"]}
    first, second = VIEWS
    assert [group.free for group in first.groups] == [True, True]
    assert WAITING == [[8, 12], [12]]
    group = second.groups[1]
    assert (group.free, group.items, group.tokens, group.largest) == (False, 1, 8, 8)
    assert_served(cluster, "r")


def test_dispatch_policy_is_not_called_if_there_is_one_answer() -> None:
    cluster = make_cluster(encode_items=1, dispatch=LAST_GROUP)
    complete(cluster, image_request("one", (b"a", 8)))
    assert not VIEWS
    complete(cluster, image_request("two", (b"b", 8), (b"c", 8), (b"d", 8)))
    assert [len(waiting) for waiting in WAITING] == [3, 2]
    assert_served(cluster, "one", "two")


def test_dispatch_policy_sees_the_requests_held_up_in_the_same_processes() -> None:
    cluster = make_cluster(encoders=2, generators=2, encode_pauses=True, dispatch=LAST_GROUP)
    cluster.submit(make_request("text", [1, 2, 3], max_tokens=8))
    cluster.run_generate()
    cluster.submit(image_request("image", (b"a", 8)))
    groups = VIEWS[-1].groups
    assert [group.held_up for group in groups] == [1, 0]
    assert groups[0].load_tokens >= 3
    cluster.drain()


def test_dispatch_of_some_images_leaves_the_others_in_place() -> None:
    """The front waits while one is encoded; afterwards it is the only image left."""
    cluster = make_cluster(encoders=2, encode_items=1, dispatch=answering("dispatch", behind))
    cluster.submit(image_request("r", (b"a", 8), (b"b", 8), (b"c", 8)))
    assert out(cluster) == {"encode-0": [b"b"], "encode-1": [b"c"]}
    cluster.run_encode("encode-0")
    assert out(cluster) == {"encode-0": [], "encode-1": [b"c"]}
    cluster.run_encode("encode-1")
    assert out(cluster) == {"encode-0": [b"a"], "encode-1": []}
    assert_served(cluster, "r")
