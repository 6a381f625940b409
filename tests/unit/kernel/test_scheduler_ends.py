"""Ends before the end: cancellation in every phase, clearing, lost groups, and requests that crash theirs."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from tests.unit.kernel.setups import (
    assert_holds_nothing,
    assert_served,
    complete,
    crash,
    encode_statistics,
    generate_statistics,
    image_request,
    joined,
    lose_while_running,
    make_cluster,
    submit_texts,
    words,
)
from vsched.kernel.events import Drain, Finished
from vsched.testing import ModelCluster, make_request
from vsched.types import FinishReason, Request

IMAGE = image_request("r", (b"a", 16), max_tokens=20)
BUSY = image_request("busy", (b"other", 8))
SHORT = [make_request(f"r{n}", words(3, start=50 * n), max_tokens=8) for n in range(4)]
LARGE = [make_request(f"r{n}", words(60, start=100 * n), max_tokens=4 + n) for n in range(3)]
APART, TOUCHING = [(0, 16, b"a"), (30, 16, b"b")], [(0, 16, b"a"), (16, 16, b"b")]


@pytest.mark.parametrize(
    ("requests", "phase", "then"),
    [
        ([BUSY, IMAGE], "all 1 encode groups are busy", ""),
        ([IMAGE], "encode encodes it", ""),
        ([*SHORT, IMAGE], "waiting for a slot", ""),
        ([make_request("r", words(80), APART)], "prefilling", ""),
        ([make_request("r", words(80), TOUCHING)], "prefilling", "waits for its image"),
        ([IMAGE], "decoding: 3 tokens", ""),
        ([*LARGE, image_request("r", (b"a", 16), max_tokens=80)], "its last step is still in", ""),
        ([IMAGE], "decoding: 3 tokens", "loses its group"),
    ],
)
def test_scheduler_abort_frees_everything_in_every_phase(
    requests: list[Request], phase: str, then: str
) -> None:
    """Queued encodes are dropped at once; resources of a step in flight are freed with that step."""
    cluster = make_cluster(*requests, blocks=50, chunk_tokens=24, pages=40, prefix_cache=False)
    while phase not in cluster.kernel.explain("r"):
        cluster.run_encode() if cluster.encode_logs["encode"] else cluster.run_generate()
    while then == "waits for its image" and cluster.generators["generate"].log:
        cluster.run_generate()
    if then == "loses its group":
        cluster.lose("generate")
    number = next(number for number, name in cluster.names.items() if name == "r")
    encoding = [task.key for step in cluster.encode_logs["encode"] for task in step.tasks]
    cluster.abort("r")
    assert cluster.ended["r"].reason is FinishReason.ABORT
    assert cluster.kernel.explain("r") == ""
    for name in cluster.requests:
        if name != "r" and name not in cluster.ended:
            cluster.abort(name)
    # Only resources of steps in flight are left, and no new step begins.
    assert encode_statistics(cluster)["waiting_items"] == 0
    assert generate_statistics(cluster)["blocks_held"] == 0
    steps = len(cluster.decisions), len(cluster.encoded)
    cluster.drain()
    assert (len(cluster.decisions), len(cluster.encoded)) == steps
    assert_holds_nothing(cluster)
    # The ranks forget it too: their next decision says so.
    for group in sorted(cluster.down):
        cluster.restore_group(group)
    complete(cluster, make_request("next", words(5)))
    held = cluster.generators["generate"].sequences
    assert number not in held
    assert set(held) <= {max(cluster.names)}
    assert encoding == [] or cluster.encoded[-1] == encoding, "aborted items are not encoded again"
    assert_served(cluster, "next")


def test_scheduler_abort_of_a_stranger_changes_nothing() -> None:
    """A request that has ended by itself gets no second reply."""
    cluster = make_cluster(make_request("r", words(5), max_tokens=2))
    cluster.drain()
    cluster.abort("r")
    cluster.abort("never seen")
    finished = cluster.kernel.statistics()["finished"]
    assert {reason: count for reason, count in finished.items() if count} == {"length": 1}


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 7, 11])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_scheduler_resumes_after_a_lost_generate_group(steps: int, prefix_cache: bool) -> None:
    """Whenever the group is lost, its requests return in their original order and end with the right tokens."""
    cluster = make_cluster(slots=3, chunk_tokens=10, blocks=40, prefix_cache=prefix_cache)
    cluster.submit(make_request("r1", words(20), max_tokens=12))
    cluster.submit(image_request("r2", (b"a", 12), max_tokens=12))
    cluster.submit(make_request("r3", words(4), [(2, 15, b"b")], max_tokens=3))
    cluster.submit(make_request("r4", words(9, start=60), max_tokens=12))
    cluster.submit(image_request("r5", (b"a", 12), max_tokens=12))
    for _ in range(steps):
        if cluster.encode_logs["encode"]:
            cluster.run_encode()
        else:
            cluster.run_generate()
    cluster.lose("generate")
    assert cluster.restarts == ["generate"]
    alive = [name for name in cluster.requests if name not in cluster.ended]
    before = len(joined(cluster))
    # A request whose image is not ready would be overtaken anyway.
    while cluster.encode_logs["encode"]:
        cluster.run_encode()
    cluster.restore_group("generate")
    cluster.drain()
    again = [name for name in joined(cluster)[before:] if not cluster.ended[name].message]
    assert sorted(again) == again == alive
    assert_served(cluster, "r1", "r2", "r3", "r4", "r5")


@pytest.mark.parametrize("losses", [1, 2])
def test_scheduler_resumes_after_a_lost_encode_group(losses: int) -> None:
    """The batch in flight is encoded again one by one; an item in flight in two losses is ended."""
    cluster = make_cluster(image_request("busy", (b"other", 4)))
    for name in ("r1", "r2"):
        cluster.submit(image_request(name, (name.encode(), 8)))
    cluster.run_encode()
    crash(cluster, "encode")
    if losses == 2:
        crash(cluster, "encode")
    cluster.drain()
    assert cluster.encoded[1] == [b"r1", b"r2"]
    assert all(len(batch) == 1 for batch in cluster.encoded[2:])
    if losses == 2:
        assert cluster.ended["r1"].code == "encode_failed"
        assert_served(cluster, "busy", "r2")
    else:
        assert_served(cluster, "busy", "r1", "r2")
    assert_holds_nothing(cluster)


@pytest.mark.parametrize(("grammar", "code"), [("{}", "grammar_failed"), ("", "no_token")])
def test_scheduler_fails_requests_that_a_rank_could_not_continue(grammar: str, code: str) -> None:
    """It ends with an error and frees everything; other requests go on."""
    cluster = make_cluster(make_request("r", words(5), max_tokens=20), prefix_cache=False)
    cluster.submit(make_request("other", words(5, start=50), max_tokens=20))
    for _ in range(4):
        cluster.run_generate()
    generator = cluster.generators["generate"]
    ((slot, number),) = (row for row in generator.slots.items() if cluster.names[row[1]] == "r")
    state = cluster.kernel._table.live[number]
    sampling = msgspec.structs.replace(state.request.sampling, grammar=grammar)
    state.request = msgspec.structs.replace(state.request, sampling=sampling)
    result, sampled = generator.step()
    for sampler, token in sampled:
        cluster.outputs[cluster.names[sampler]].append(token)
    generator.end_sequence(slot)
    ended = [Finished(slot, number, FinishReason.ERROR)]
    cluster.send(msgspec.structs.replace(result, finished=ended))
    assert cluster.ended["r"].reason is FinishReason.ERROR
    cluster.faults += 1
    assert cluster.ended["r"].code == code
    assert "Remedy" in cluster.ended["r"].message
    assert_served(cluster, "other")


@pytest.mark.parametrize(("count", "poison", "losses"), [(1, "r0", 2), (7, "r4", 3)])
def test_poison_is_found_and_no_other_request_ends(count: int, poison: str, losses: int) -> None:
    """Suspects come back one at a time; the one in quarantine when the group is lost is to blame."""
    cluster = make_cluster(slots=8)
    names = submit_texts(cluster, count, 6, max_tokens=12)
    assert lose_while_running(cluster, poison) == losses
    codes = Counter(finish.code for finish in cluster.ended.values() if finish.code)
    assert codes == {"group_lost": 1}
    assert_served(cluster, *(name for name in names if name != poison))


def test_suspects_of_two_losses_from_outside_are_cleared() -> None:
    """A group that is killed from outside, however often, ends no request as long as others run there."""
    cluster = make_cluster(slots=4)
    names = submit_texts(cluster, 4, 6, max_tokens=40)
    for _ in range(4):
        while len(cluster.kernel.generators[0].running) < 4:
            cluster.run_generate()
        for _ in range(3):
            cluster.run_generate()
        crash(cluster)
    assert_served(cluster, *names)


def test_cleared_suspect_is_not_ended_for_one_more_loss() -> None:
    """A request that got past the point of the loss starts over, even if it runs alone by then."""
    cluster = make_cluster(make_request("long", words(6), max_tokens=60), slots=2)
    cluster.submit(make_request("short", words(6, start=40), max_tokens=15))
    for _ in range(2):
        for _ in range(5):
            cluster.run_generate()
        crash(cluster)
    while "short" not in cluster.ended:
        cluster.run_generate()
    crash(cluster)
    assert_served(cluster, "long", "short")


def lose_repeatedly(cluster: ModelCluster, group: str, *, times: int) -> set[int]:
    """Lose a group several times after a few steps each; return the numbers of the requests that ran there."""
    running: set[int] = set()
    for _ in range(times):
        for _ in range(3):
            cluster.run_generate(group)
        running |= cluster.generators[group].sequences.keys()
        crash(cluster, group)
    return running


@pytest.mark.parametrize("losses", [1, 2])
def test_drain_finishes_requests_that_ran_in_its_group_when_it_was_lost(losses: int) -> None:
    """No other group accepts such a request, so draining must not leave it behind."""
    cluster = make_cluster(generators=2)
    names = submit_texts(cluster, 4, 6, max_tokens=20)
    own = lose_repeatedly(cluster, "generate-0", times=losses)
    assert len(own) == 2
    cluster.send(Drain("generate-0"))
    while not cluster.drained:
        cluster.run_generate()
        elsewhere = cluster.generators["generate-1"].sequences.keys()
        assert not own & elsewhere, "it went to another group"
    assert {cluster.names[number] for number in own} <= cluster.ended.keys()
    assert_served(cluster, *names)
    assert cluster.drained == ["generate-0"]
    assert_holds_nothing(cluster)


def test_requests_that_are_no_suspects_join_next_to_one() -> None:
    """Only suspects wait for each other."""
    cluster = make_cluster(slots=4)
    submit_texts(cluster, 2, 6, max_tokens=40)
    lose_repeatedly(cluster, "generate", times=2)
    cluster.submit(make_request("new", words(6, start=200)))
    before = len(joined(cluster))
    assert_served(cluster, "r0", "r1", "new")
    assert joined(cluster)[before:] == ["new", "r1"]
