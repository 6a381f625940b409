"""The state machine between policy and ranks: votes, whole blocks, and invalid decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tests.contract.harmful import changed_by
from tests.unit.memory.views import memory_view, rank_memory, reserved
from vsched.errors import DeviceOutOfMemory, MemoryLeak, PolicyError
from vsched.memory import Accepted, KvNegotiation, LedgerLine
from vsched.policy import AcceptBuild, AttemptOutcome, Build, Fail, MemoryPolicy, MemoryView, Probe
from vsched.testing.model_ranks.kv_sizing import SimulatedReport

TWO_RANKS = [rank_memory(rank=rank, pool=f"device {rank}") for rank in range(2)]


class Scripted(MemoryPolicy, frozen=True, kw_only=True):
    """Returns scripted decisions."""

    script: ClassVar[Callable[[MemoryView], Any]]

    def plan(self, view: MemoryView) -> Probe | Build | AcceptBuild | Fail:
        answer: Probe | Build | AcceptBuild | Fail = type(self).script(view)
        return answer


def scripted(script: Callable[[MemoryView], Any]) -> MemoryPolicy:
    made: MemoryPolicy = type(
        "Scripted", (Scripted,), {"script": staticmethod(script)}, frozen=True
    )()
    return made


def following(*answers: Any) -> MemoryPolicy:
    return scripted(lambda view: answers[len(view.attempts)])


def report(rank: int = 0, outcome: AttemptOutcome = "fits", message: str = "") -> SimulatedReport:
    memory = rank_memory(rank=rank, pool=f"device {rank}", peak_bytes=300_000)
    return SimulatedReport(outcome=outcome, message=message, memory=memory)


def two(policy: MemoryPolicy) -> KvNegotiation:
    return KvNegotiation(policy, memory_view(ranks=TWO_RANKS))


def test_negotiation_hands_out_orders_until_it_is_over() -> None:
    seen: list[MemoryView] = []

    def script(view: MemoryView) -> Any:
        seen.append(view)
        return [Probe(100), Build(1000, headroom_bytes=7), AcceptBuild()][len(view.attempts)]

    negotiation = two(scripted(script))
    assert negotiation.start() == Probe(96)
    assert negotiation.take([report(1), report(0)]) == Build(992, headroom_bytes=7)
    assert negotiation.take([report(0), report(1)]) == Accepted(992, 62)
    assert [len(view.attempts) for view in seen] == [0, 1, 2]
    probe, build = seen[-1].attempts
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
    negotiation = two(following(Build(1000), Fail("no")))
    negotiation.start()
    reports = [report(rank, vote, f"because {rank}") for rank, vote in enumerate(votes)]
    with pytest.raises((DeviceOutOfMemory, MemoryLeak)):
        negotiation.take(reports)
    (attempt,) = negotiation.view.attempts
    assert attempt.outcome == outcome


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 2], [1, 2]])
def test_negotiation_wants_a_report_of_each_rank(ranks: list[int]) -> None:
    """Nothing is decided before all have reported."""
    negotiation = two(following(Build(1000), AcceptBuild()))
    negotiation.start()
    with pytest.raises(AssertionError, match="not one report of each rank"):
        negotiation.take([report(rank) for rank in ranks])


def test_negotiation_quotes_the_first_who_says_why() -> None:
    negotiation = two(following(Build(1000), Build(500)))
    negotiation.start()
    first = report(1, "out_of_memory", "no room: value 2, limit 1. Remedy: allocate less.")
    negotiation.take([first, report(0)])
    assert negotiation.view.attempts[0].message == "rank 1: no room: value 2, limit 1."
    negotiation = two(following(Build(1000), Build(500)))
    negotiation.start()
    negotiation.take([first, report(0, "out_of_memory", "stress")])
    assert negotiation.view.attempts[0].message == "rank 0, and 1 more: stress"


def test_negotiation_fails_with_the_ledger() -> None:
    """The typed error quotes the reservations and everything else."""
    view = memory_view(reservations=[reserved(50_000), reserved(0, rank=1, pool="other")])
    negotiation = KvNegotiation(following(Fail("too much")), view)
    with pytest.raises(DeviceOutOfMemory) as caught:
        negotiation.start()
    assert str(caught.value) == (
        "too much Memory of device: 976.6 KiB = generate rank 0 weights 146.5 KiB + generate rank 0 language "
        "activations 48.8 KiB + others peers 97.7 KiB + encode rank 0 encoder activations 48.8 KiB + "
        "unclaimed 634.8 KiB; other: 0 bytes = encode rank 1 encoder activations 0 bytes + unclaimed 0 bytes."
    )
    assert negotiation.failure == Fail("too much")


def test_negotiation_ledger_has_the_canary_of_the_build() -> None:
    negotiation = two(following(Build(1000, headroom_bytes=7), AcceptBuild()))
    negotiation.start()
    negotiation.take([report(0), report(1)])
    lines = negotiation.ledger().of_pool("device 1")
    assert [line.bytes for line in lines if line.line == "headroom"] == [7]


def test_negotiation_ledger_knows_the_encoders_and_more() -> None:
    negotiation = KvNegotiation(
        following(Fail("no")),
        memory_view(),
        encoders=[rank_memory(weights_bytes=1024)],
        more=[LedgerLine("host", "engine", "arena", 2048)],
    )
    with pytest.raises(DeviceOutOfMemory) as caught:
        negotiation.start()
    assert "encode rank 0 weights 1.0 KiB" in str(caught.value)
    assert "host: 2.0 KiB = engine arena 2.0 KiB" in str(caught.value)


@pytest.mark.parametrize("answer", [Fail("it leaked", leak=True), Fail("it leaked"), Build(16)])
def test_negotiation_ends_with_a_leak(answer: Fail | Build) -> None:
    """Whatever the policy decides, a leak is an error of its own and nothing is tried again."""
    negotiation = KvNegotiation(following(Probe(100), answer), memory_view())
    negotiation.start()
    with pytest.raises(MemoryLeak, match="leak"):
        negotiation.take([report(0, "leak", "0 of 9 bytes came back")])
    assert not isinstance(MemoryLeak("x"), DeviceOutOfMemory)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Build(15), "value 15 tokens, limit at least 16 tokens"),
        (Probe(0), "value 0 tokens"),
        (Probe(-1), "value -1 tokens"),
        (Build(100_001), "value 1000010 bytes of KV and 0 of headroom, limit 1000000 bytes"),
        (Build(100_000, headroom_bytes=1), "value 1000000 bytes of KV and 1 of headroom"),
        (Build(16, headroom_bytes=-1), "its headroom is below nothing"),
        (Build(16.5), "cannot be interpreted as an integer"),  # type: ignore[arg-type]
        (AcceptBuild(), "accepts what does not stand: value last attempt none"),
        (None, "returned None, which is none of Probe, Build, AcceptBuild and Fail"),
        (100, "returned 100, which is none of"),
    ],
)
def test_negotiation_refuses_nonsense(answer: Any, words: str) -> None:
    """The error names the class; no default would know the device better."""
    with pytest.raises(PolicyError, match=r"generate\.memory: Scripted\.plan") as caught:
        KvNegotiation(following(answer), memory_view()).start()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("order", "outcome", "words"),
    [
        (Probe(100), "fits", "value last attempt probe: fits"),
        (Build(100), "out_of_memory", "value last attempt build: out_of_memory"),
    ],
)
def test_negotiation_accepts_only_what_stands(
    order: Probe | Build, outcome: AttemptOutcome, words: str
) -> None:
    negotiation = KvNegotiation(following(order, AcceptBuild()), memory_view())
    negotiation.start()
    with pytest.raises(PolicyError, match=words):
        negotiation.take([report(0, outcome)])


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
def test_negotiation_names_a_policy_that_raises_what_would_end_a_program(
    error: BaseException,
) -> None:
    def script(view: MemoryView) -> Any:
        raise error

    with pytest.raises(PolicyError, match=r"Scripted\.plan failed"):
        KvNegotiation(scripted(script), memory_view()).start()


def test_negotiation_view_cannot_be_changed() -> None:
    def script(view: MemoryView) -> Any:
        assert not changed_by(view)
        return Probe(100) if not view.attempts else Build(100)

    negotiation = KvNegotiation(scripted(script), memory_view())
    negotiation.start()
    assert isinstance(negotiation.take([report(0)]), Build)


def test_negotiation_names_a_policy_that_raises() -> None:
    def script(view: MemoryView) -> Any:
        raise ZeroDivisionError(f"after {len(view.attempts)}")

    with pytest.raises(PolicyError, match=r"Scripted\.plan failed: ZeroDivisionError\('after 0'\)"):
        KvNegotiation(scripted(script), memory_view()).start()


def test_negotiation_comes_to_an_end() -> None:
    """After sixteen attempts."""
    negotiation = KvNegotiation(scripted(lambda _: Probe(16)), memory_view())
    negotiation.start()
    for _ in range(15):
        assert negotiation.take([report()]) == Probe(16)
    with pytest.raises(PolicyError, match="comes to no end: value 16 attempts behind it, limit 16"):
        negotiation.take([report()])


def test_negotiation_knows_its_turn() -> None:
    negotiation = KvNegotiation(following(Build(100), AcceptBuild()), memory_view())
    with pytest.raises(AssertionError, match="no order is out"):
        negotiation.take([report()])
    negotiation.start()
    with pytest.raises(AssertionError, match="started twice"):
        negotiation.start()
    negotiation.take([report()])
    with pytest.raises(AssertionError, match="no order is out"):
        negotiation.take([report()])
