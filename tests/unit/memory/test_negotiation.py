"""The state machine between policy and ranks: votes, whole blocks, and invalid decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tests.contract.harmful import ODD, RAISES, Angry, Odd, changed_by
from tests.unit.memory.views import memory_view, rank_memory, reserved
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


def two(policy: MemoryPolicy) -> KvNegotiation:
    return KvNegotiation(policy, memory_view(ranks=TWO_RANKS))


def begun(policy: MemoryPolicy, *, ranks: Any = None) -> KvNegotiation:
    """A negotiation whose first order is out."""
    negotiation = KvNegotiation(
        policy, memory_view() if ranks is None else memory_view(ranks=ranks)
    )
    negotiation.start()
    return negotiation


def test_negotiation_hands_out_orders_until_it_is_over() -> None:
    seen: list[Attempt] = []

    def script(_: MemoryView) -> MemoryPlan:
        seen.append((yield Probe(100)))
        seen.append((yield Build(1000, headroom_bytes=7)))

    negotiation = two(scripted(script))
    assert negotiation.start() == Probe(96)
    assert negotiation.take([report(1), report(0)]) == Build(992, headroom_bytes=7)
    assert negotiation.take([report(0), report(1)]) == Accepted(992, 62)
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
    """If one rank fails, the attempt fails on all; all get the same next order."""
    negotiation = begun(following(Build(1000), DeviceOutOfMemory("no")), ranks=TWO_RANKS)
    reports = [report(rank, vote, f"because {rank}") for rank, vote in enumerate(votes)]
    with pytest.raises((DeviceOutOfMemory, MemoryLeak)):
        negotiation.take(reports)
    (attempt,) = negotiation.attempts
    assert attempt.outcome == outcome


def test_negotiation_quotes_the_first_reason() -> None:
    negotiation = begun(following(Build(1000), Build(500)), ranks=TWO_RANKS)
    first = report(1, "out_of_memory", "no room: value 2, limit 1")
    negotiation.take([first, report(0)])
    assert negotiation.attempts[0].message == "rank 1: no room: value 2, limit 1"
    negotiation = begun(following(Build(1000), Build(500)), ranks=TWO_RANKS)
    negotiation.take([first, report(0, "out_of_memory", "stress")])
    assert negotiation.attempts[0].message == "rank 0, and 1 more: stress"


def test_negotiation_fails_with_the_ledger() -> None:
    """The typed error quotes the reservations and everything else."""
    view = memory_view(reservations=[reserved(50_000), reserved(0, rank=1, pool="other")])
    negotiation = KvNegotiation(following(DeviceOutOfMemory("too much")), view)
    with pytest.raises(DeviceOutOfMemory) as caught:
        negotiation.start()
    assert str(caught.value) == (
        "too much Memory of device: 976.6 KiB = generate rank 0 weights 146.5 KiB + generate rank 0 language "
        "activations 48.8 KiB + others peers 97.7 KiB + encode rank 0 encoder activations 48.8 KiB + "
        "unclaimed 634.8 KiB; other: 0 bytes = encode rank 1 encoder activations 0 bytes + unclaimed 0 bytes."
    )


def test_negotiation_ends_with_a_leak() -> None:
    """Whatever the policy does, a leak is an error of its own and nothing is tried again."""
    requested: list[str] = []

    def script(_: MemoryView) -> MemoryPlan:
        try:
            yield Probe(8192)
            yield Build(64)
            requested.append("after the leak")
        finally:
            requested.append("closed")
            yield Probe(16)

    negotiation = begun(scripted(script))
    stood = rank_memory(kv_bytes=81_920)
    negotiation.take([Sized("fits", "", stood)])
    leaked = rank_memory(released_bytes=7)
    with pytest.raises(MemoryLeak) as caught:
        negotiation.take([Sized("leak", "7 of 81920 bytes came back", leaked)])
    assert requested == ["closed"]
    assert "memory leaked" in str(caught.value)
    assert "rank 0: 7 of 81920 bytes came back" in str(caught.value)
    assert "Memory of device: " in str(caught.value)
    assert not isinstance(MemoryLeak("x"), DeviceOutOfMemory)


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
        KvNegotiation(following(answer), memory_view()).start()
    assert words in str(caught.value)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
@pytest.mark.parametrize("wrap", [lambda odd: odd, Probe, lambda odd: Build(64, True, odd)])
def test_negotiation_survives_odd_values(odd: Odd, wrap: Callable[[Any], Any]) -> None:
    """Whatever is yielded or returned, the policy is named, unless the value is a number of tokens or bytes."""
    negotiation = KvNegotiation(following(wrap(odd.make())), memory_view())
    if wrap is not Probe and odd.name == "a bool":
        return
    with pytest.raises(PolicyError, match=r"generate\.memory: Scripted\.plan yielded"):
        negotiation.start()
    with pytest.raises(PolicyError, match="which is not a generator"):
        KvNegotiation(scripted(lambda _: wrap(Angry())), memory_view()).start()


@pytest.mark.parametrize("fail", RAISES)
def test_negotiation_survives_all_exceptions(fail: Callable[[], object]) -> None:
    def script(_: MemoryView) -> MemoryPlan:
        yield Probe(16)
        fail()

    negotiation = begun(scripted(script))
    with pytest.raises(PolicyError, match=r"Scripted\.plan failed"):
        negotiation.take([report()])


def test_negotiation_refuses_a_policy_that_returns_a_value() -> None:
    def script(_: MemoryView) -> Any:
        yield Build(100)
        return Build(100)

    negotiation = begun(scripted(script))
    with pytest.raises(PolicyError, match=r"returned Build\(tokens=100"):
        negotiation.take([report()])


@pytest.mark.parametrize(
    ("orders", "words"), [([], "value no attempt"), ([Probe(100)], "value last attempt a probe")]
)
def test_negotiation_accepts_nothing_but_a_build(orders: list[Probe], words: str) -> None:
    negotiation = KvNegotiation(following(*orders), memory_view())

    def run() -> None:
        negotiation.start()
        negotiation.take([report()])

    with pytest.raises(PolicyError, match=f"ended without a build: {words}"):
        run()


def test_negotiation_fails_if_the_last_build_does_not_fit() -> None:
    """A policy that does not look at the outcome is no danger."""
    negotiation = begun(following(Build(100)))
    with pytest.raises(DeviceOutOfMemory) as caught:
        negotiation.take([report(0, "out_of_memory", "no room")])
    assert str(caught.value).startswith(
        "generate.memory: memory ran out on device 0 (rank 0: no room): value 96 tokens (960 bytes), "
        "limit total 976.6 KiB. Remedy: lower generate.memory.mem_fraction (now 0.95)"
    )


@pytest.mark.parametrize(("tokens", "fits"), [(34_000, True), (36_000, False)])
@pytest.mark.parametrize("headroom_bytes", [0, 100_000])
def test_negotiation_keeps_the_room_of_encoders(
    tokens: int, headroom_bytes: int, *, fits: bool
) -> None:
    """A build that leaves less than the reservations does not fit, whatever the ranks say; headroom is room."""
    encoders = [reserved(250_000), reserved(900_000, rank=1, held=True)]
    view = memory_view(reservations=encoders)
    negotiation = KvNegotiation(following(Build(tokens, headroom_bytes=headroom_bytes)), view)
    negotiation.start()
    # 100,000 of others, 300,000 at the peak without KV.
    peak_bytes = 300_000 + 10 * tokens + headroom_bytes
    memory = rank_memory(
        reserved_bytes=peak_bytes, peak_bytes=peak_bytes, available_bytes=900_000 - peak_bytes
    )
    if fits:
        assert negotiation.take([Sized("fits", "", memory)]) == Accepted(tokens, tokens // 16)
        return
    with pytest.raises(DeviceOutOfMemory, match=r"device: .* left, and encode ranks need 244\.1"):
        negotiation.take([Sized("fits", "", memory)])


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("now"), SystemExit(0), KeyboardInterrupt(), GeneratorExit()]
)
def test_negotiation_names_a_policy_that_raises(error: BaseException) -> None:
    """Before its first order, even what would end a program."""

    def script(view: MemoryView) -> Any:
        raise error

    with pytest.raises(PolicyError, match=rf"Scripted\.plan failed: {type(error).__name__}"):
        KvNegotiation(scripted(script), memory_view()).start()


def test_negotiation_view_cannot_be_changed() -> None:
    def script(view: MemoryView) -> MemoryPlan:
        assert not changed_by(view)
        assert not changed_by((yield Probe(100)))
        yield Build(100)

    negotiation = begun(scripted(script))
    assert isinstance(negotiation.take([report(0)]), Build)


def test_negotiation_stops_an_endless_policy() -> None:
    """After sixteen attempts."""
    negotiation = begun(following(*[Probe(16)] * 99))
    for _ in range(15):
        assert negotiation.take([report()]) == Probe(16)
    with pytest.raises(PolicyError, match="does not end: value 16 attempts behind it, limit 16"):
        negotiation.take([report()])
