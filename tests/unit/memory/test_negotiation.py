"""Sizing between policy and ranks: votes, whole blocks, invalid decisions, and failures of every single allocation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.harmful import ODD, RAISES, Angry, Odd, changed_by
from tests.unit.memory.views import memory_view, rank_memory, reserved
from tests.workers.properties import REPEATABLE
from vsched.errors import DeviceOutOfMemory, MemoryLeak, PolicyError
from vsched.memory import Accepted, KvNegotiation, Sized
from vsched.policy import (
    Attempt,
    AttemptOutcome,
    Build,
    MemoryPlan,
    MemoryPolicy,
    MemoryView,
    Probe,
)
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.testing.memory_check import KvSizingRank, load_view, negotiate
from vsched_policies.memory import AutoProfile, Pinned

TWO_RANKS = [rank_memory(rank=rank, pool=f"device {rank}") for rank in range(2)]


class Scripted(MemoryPolicy, frozen=True, kw_only=True):
    """Yields scripted orders."""

    script: ClassVar[Callable[[MemoryView], Any]]

    def plan(self, view: MemoryView) -> MemoryPlan:
        plan: MemoryPlan = type(self).script(view)
        return plan


def scripted(script: Callable[[MemoryView], Any]) -> MemoryPolicy:
    made: MemoryPolicy = type(
        "Scripted", (Scripted,), {"script": staticmethod(script)}, frozen=True
    )()
    return made


def following(*choices: Any) -> MemoryPolicy:
    """Yield the answers one by one, and return after the last; raise those that are errors."""

    def script(_: MemoryView) -> MemoryPlan:
        for answer in choices:
            if isinstance(answer, BaseException):
                raise answer
            yield answer

    return scripted(script)


def report(rank: int = 0, outcome: AttemptOutcome = "fits", message: str = "") -> Sized:
    memory = rank_memory(rank=rank, pool=f"device {rank}", peak_bytes=300_000)
    return Sized(outcome=outcome, message=message, memory=memory)


def begun(policy: MemoryPolicy, *, ranks: Any = None) -> KvNegotiation:
    """A negotiation whose first order is out."""
    negotiation = KvNegotiation(
        policy, memory_view() if ranks is None else memory_view(ranks=ranks)
    )
    negotiation.first_order()
    return negotiation


def test_negotiation_hands_out_orders_until_it_is_over() -> None:
    seen: list[Attempt] = []

    def script(_: MemoryView) -> MemoryPlan:
        seen.append((yield Probe(100)))
        seen.append((yield Build(1000, headroom_bytes=7)))

    negotiation = KvNegotiation(scripted(script), memory_view(ranks=TWO_RANKS))
    assert negotiation.first_order() == Probe(96)
    assert negotiation.next_order([report(1), report(0)]) == Build(992, headroom_bytes=7)
    assert negotiation.next_order([report(0), report(1)]) == Accepted(992, 62)
    probe, build = seen
    assert (probe.action, probe.tokens, probe.outcome) == ("probe", 96, "fits")
    assert (build.action, build.tokens, build.message) == ("build", 992, "")
    assert [rank.rank for rank in probe.ranks] == [0, 1]


@pytest.mark.parametrize(
    ("votes", "outcome"),
    [
        (["fits", "fits"], "fits"),
        (["fits", "out_of_memory"], "out_of_memory"),
        (["out_of_memory", "fits"], "out_of_memory"),
        (["out_of_memory", "leak"], "leak"),
        (["leak", "fits"], "leak"),
    ],
)
def test_negotiation_is_a_vote_of_all_ranks(
    votes: list[AttemptOutcome], outcome: AttemptOutcome
) -> None:
    """If one rank fails, the attempt fails on all; all get the same next order. After a leak nothing is tried."""
    negotiation = begun(following(Build(1000), DeviceOutOfMemory("no")), ranks=TWO_RANKS)
    reports = [report(rank, vote, f"because {rank}") for rank, vote in enumerate(votes)]
    error, words = (
        (MemoryLeak, "leaked.*because") if outcome == "leak" else (DeviceOutOfMemory, "no")
    )
    with pytest.raises(error, match=words) as caught:
        negotiation.next_order(reports)
    assert "Memory of device" in str(caught.value), "the ledger"
    (attempt,) = negotiation.attempts
    assert attempt.outcome == outcome


def test_negotiation_quotes_the_first_reason() -> None:
    negotiation = begun(following(Build(1000), Build(500)), ranks=TWO_RANKS)
    first = report(1, "out_of_memory", "no room: value 2, limit 1")
    negotiation.next_order([first, report(0)])
    assert negotiation.attempts[0].message == "rank 1: no room: value 2, limit 1"
    negotiation = begun(following(Build(1000), Build(500)), ranks=TWO_RANKS)
    negotiation.next_order([first, report(0, "out_of_memory", "stress")])
    assert negotiation.attempts[0].message == "rank 0, and 1 more: stress"


def test_negotiation_fails_with_the_ledger() -> None:
    """The typed error quotes the reservations and everything else."""
    view = memory_view(reservations=[reserved(50_000), reserved(0, rank=1, pool="other")])
    negotiation = KvNegotiation(following(DeviceOutOfMemory("too much")), view)
    with pytest.raises(DeviceOutOfMemory) as caught:
        negotiation.first_order()
    assert str(caught.value) == (
        "too much Memory of device: 976.6 KiB = generate rank 0 weights 146.5 KiB + generate rank 0 language "
        "activations 48.8 KiB + others peers 97.7 KiB + encode rank 0 encoder activations 48.8 KiB + "
        "unclaimed 634.8 KiB; other: 0 bytes = encode rank 1 encoder activations 0 bytes + unclaimed 0 bytes."
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Build(15), "value 15 tokens, limit at least 16 tokens"),
        (Probe(0), "value 0 tokens"),
        (Probe(-1), "value -1 tokens"),
        (Build(100_001), "value 1000010 bytes of KV and 0 of headroom, limit 1000000 bytes"),
        (Build(100_000, headroom_bytes=1), "value 1000000 bytes of KV and 1 of headroom"),
        (Build(16, headroom_bytes=-1), "its headroom is negative"),
        (Build(16.5), "cannot be interpreted as an integer"),  # type: ignore[arg-type]
        (None, "yielded None, which is neither Probe nor Build"),
        (100, "yielded 100, which is neither"),
    ],
)
def test_negotiation_refuses_nonsense(answer: Any, words: str) -> None:
    """The error names the class; no default would know the device better."""
    with pytest.raises(PolicyError, match=r"generate\.memory: Scripted\.plan") as caught:
        KvNegotiation(following(answer), memory_view()).first_order()
    assert words in str(caught.value)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
@pytest.mark.parametrize("wrap", [lambda odd: odd, Probe, lambda odd: Build(64, True, odd)])
def test_negotiation_survives_odd_values(odd: Odd, wrap: Callable[[Any], Any]) -> None:
    """Whatever is yielded or returned, the policy is named, unless the value is a number of tokens or bytes."""
    negotiation = KvNegotiation(following(wrap(odd.make())), memory_view())
    if wrap is not Probe and odd.name == "a bool":
        return
    with pytest.raises(PolicyError, match=r"generate\.memory: Scripted\.plan yielded"):
        negotiation.first_order()
    with pytest.raises(PolicyError, match="which is not a generator"):
        KvNegotiation(scripted(lambda _: wrap(Angry())), memory_view()).first_order()


@pytest.mark.parametrize("fail", RAISES)
def test_negotiation_survives_all_exceptions(fail: Callable[[], object]) -> None:
    """Before and after the first order, including exceptions like `SystemExit`."""

    def begin(_: MemoryView) -> MemoryPlan:
        fail()
        yield Probe(16)

    def go_on(_: MemoryView) -> MemoryPlan:
        yield Probe(16)
        fail()

    with pytest.raises(PolicyError, match=r"Scripted\.plan failed"):
        begun(scripted(begin))
    negotiation = begun(scripted(go_on))
    with pytest.raises(PolicyError, match=r"Scripted\.plan failed"):
        negotiation.next_order([report()])


def test_negotiation_fails_if_the_last_build_does_not_fit() -> None:
    """A policy that does not look at the outcome is no danger."""
    negotiation = begun(following(Build(100)))
    with pytest.raises(DeviceOutOfMemory) as caught:
        negotiation.next_order([report(0, "out_of_memory", "no room")])
    assert str(caught.value).startswith(
        "generate.memory: memory ran out on device 0 (rank 0: no room): value 96 tokens (960 bytes), "
        "limit total 976.6 KiB. Remedy: lower generate.memory.mem_fraction (now 0.95)"
    )


@pytest.mark.parametrize(("tokens", "fits"), [(34_000, True), (36_000, False)])
@pytest.mark.parametrize("headroom_bytes", [0, 100_000])
def test_negotiation_spares_encoders(tokens: int, headroom_bytes: int, *, fits: bool) -> None:
    """A build that leaves less than the reservations does not fit, whatever the ranks say; headroom is room."""
    encoders = [reserved(250_000), reserved(900_000, rank=1, held=True)]
    view = memory_view(reservations=encoders)
    negotiation = KvNegotiation(following(Build(tokens, headroom_bytes=headroom_bytes)), view)
    negotiation.first_order()
    # 100,000 of others, 300,000 at the peak without KV.
    peak_bytes = 300_000 + 10 * tokens + headroom_bytes
    memory = rank_memory(
        reserved_bytes=peak_bytes, peak_bytes=peak_bytes, available_bytes=900_000 - peak_bytes
    )
    if fits:
        assert negotiation.next_order([Sized("fits", "", memory)]) == Accepted(tokens, tokens // 16)
        return
    with pytest.raises(DeviceOutOfMemory, match=r"device: .* left, and encode ranks need 244\.1"):
        negotiation.next_order([Sized("fits", "", memory)])


def test_negotiation_view_cannot_be_changed() -> None:
    def script(view: MemoryView) -> MemoryPlan:
        assert not changed_by(view)
        assert not changed_by((yield Probe(100)))
        yield Build(100)

    negotiation = begun(scripted(script))
    assert isinstance(negotiation.next_order([report(0)]), Build)


MIB = 1 << 20
HEADROOM = 16 * MIB
AUTO = AutoProfile(headroom_bytes=HEADROOM)
PINNED = Pinned(tokens=20_000, headroom_bytes=HEADROOM)
WITHOUT_FAILURE = 53_504
"""Tokens that `AUTO` finds on these ranks."""
ORDERS_MAX = {"AutoProfile": 6, "Pinned": 1}
KNOBS = ("generate.max_batch_tokens", "generate.slots", "encode.admission.max_tokens")


def group(total_mib: int = 512) -> list[KvSizingRank]:
    devices = [SimulatedMemory(total_mib * MIB, pool=f"device {rank}") for rank in range(2)]
    return [KvSizingRank(device, rank=rank) for rank, device in enumerate(devices)]


class Ended:
    """End of a negotiation, with the invariants of every end."""

    def __init__(
        self, policy: MemoryPolicy, ranks: list[KvSizingRank], newcomer_bytes: int = 0
    ) -> None:
        self.negotiation = KvNegotiation(policy, load_view(ranks))
        self.accepted: Accepted | None = None
        self.error: Exception | None = None

        def between(_: int) -> None:
            if newcomer_bytes:
                ranks[0].memory.set_peers_bytes(newcomer_bytes)

        try:
            self.accepted = negotiate(self.negotiation, ranks, between=between)
        except DeviceOutOfMemory as error:
            self.error = error
        self.attempts = self.negotiation.attempts
        assert len(self.attempts) <= ORDERS_MAX[type(policy).__name__]
        for rank in ranks:
            rank.memory.check_invariants()
            rank.memory.heal()
            self._check_rank(rank)

    def _check_rank(self, rank: KvSizingRank) -> None:
        weights = sum(-(-size // 512) * 512 for size in rank.weights)
        if self.accepted is not None:
            # The accepted size fits again with its headroom, and only weights and KV stay allocated.
            rank.memory.reset_peak()
            with rank.memory.hold(HEADROOM):
                rank.profile()
            kv_bytes = self.accepted.tokens * rank.bytes_per_token
            assert 0 <= rank.memory.allocated() - weights - kv_bytes < 4 * 512
        rank.tear_down()
        assert rank.memory.allocated() == weights, "activations or headroom were left behind"


def allocations_after_load(policy: MemoryPolicy) -> int:
    """Number of allocations of one rank in a negotiation without failures."""
    ranks = group()
    loaded = len(ranks[0].weights)
    assert negotiate(KvNegotiation(policy, load_view(ranks)), ranks)
    return ranks[0].memory.allocations - loaded


def failed_attempts(policy: MemoryPolicy, failing: list[int], number: int) -> list[str]:
    """Let an allocation after loading fail in each of these ranks, and return the failed attempts."""
    ranks = group()
    for rank in failing:
        ranks[rank].memory.fail_at(len(ranks[rank].weights) + number)
    ended = Ended(policy, ranks)
    assert ended.attempts[0].outcome == "out_of_memory" or len(ended.attempts) > 1
    if isinstance(policy, AutoProfile):
        assert ended.accepted is not None, "one failure is recovered"
        assert ended.accepted.tokens > 0.94 * WITHOUT_FAILURE
    else:
        assert isinstance(ended.error, DeviceOutOfMemory)
        assert all(knob in str(ended.error) for knob in KNOBS)
    return [
        f"{each.message} ({each.action})"
        for each in ended.attempts
        if each.outcome == "out_of_memory"
    ]


@pytest.mark.parametrize("policy", [AUTO, PINNED], ids=["auto-profile", "pinned"])
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]], ids=["first", "second", "all"])
def test_sizing_survives_each_allocation_failing(policy: MemoryPolicy, failing: list[int]) -> None:
    """If any allocation fails in any phase, in one rank or all, sizing ends without leftovers."""
    reported = []
    for number in range(1, allocations_after_load(policy) + 1):
        (message,) = failed_attempts(policy, failing, number)
        assert message.startswith(f"rank {failing[0]}")
        reported.append(message)
    actions = ("probe", "build") if isinstance(policy, AutoProfile) else ("build",)
    parts = ("building the KV cache", "running the hardest steps")
    for action, part in [*itertools.product(actions, parts), ("build", "holding headroom")]:
        found = [one for one in reported if part in one and one.endswith(f"({action})")]
        assert found, f"nothing failed in a {action} while {part}"


@REPEATABLE
@given(
    failures=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 60)), min_size=1, max_size=24, unique=True
    ),
    total_mib=st.integers(48, 512),
)
def test_sizing_survives_many_failures(failures: list[tuple[int, int]], total_mib: int) -> None:
    """Any number of failed allocations, on devices of any size: tight ones, and ones too small."""
    ranks = group(total_mib=total_mib)
    for rank, number in failures:
        ranks[rank].memory.fail_at(len(ranks[rank].weights) + number)
    ended = Ended(AUTO, ranks)
    if ended.accepted is None:
        assert isinstance(ended.error, DeviceOutOfMemory)
        assert all(knob in str(ended.error) for knob in KNOBS)
        assert all(f"device {rank}: " in str(ended.error) for rank in range(2)), "the ledger"


@pytest.mark.parametrize(("peer_mib", "fits"), [(8, True), (96, True), (300, True), (480, False)])
def test_sizing_makes_room_for_a_peer(peer_mib: int, fits: bool) -> None:
    """A process that comes between probe and build is seen by the build that fails, and memory is left for it."""
    ended = Ended(AUTO, group(), newcomer_bytes=peer_mib * MIB)
    assert ended.attempts[0].outcome == "fits"
    if not fits:
        assert "others peers 480.0 MiB" in str(ended.error)
        return
    assert ended.accepted is not None
    left_mib = 512 - peer_mib - 24 - 16 - 20
    assert 0.85 * left_mib < ended.accepted.tokens * 8192 / MIB <= left_mib


@pytest.mark.parametrize("kept_mib", [15, 65])
def test_sizing_stops_at_memory_that_stays_after_the_release(kept_mib: int) -> None:
    """A reference to a graph, an attention kernel or the headroom; libraries may keep less."""
    ranks = group()
    ranks[1].kept_bytes = kept_mib * MIB
    negotiation = KvNegotiation(AUTO, load_view(ranks))
    if kept_mib == 15:
        assert negotiate(negotiation, ranks)
        return
    with pytest.raises(MemoryLeak, match=f"value {65 * MIB}, limit {64 * MIB}"):
        negotiate(negotiation, ranks)
    assert [attempt.outcome for attempt in negotiation.attempts] == ["fits", "leak"]
