"""`check_policy` accepts policies that keep their contract, and names seed and fault of others."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from tests.each_case import each_case
from tests.unit.kernel.policy_pool import HoldingForEver, Tallied
from tests.unit.kernel.setups import answering
from vsched.errors import DeviceOutOfMemory, PolicyError, limit_message
from vsched.policy import (
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    Build,
    EncodeLimits,
    EncodingView,
    MemoryPlan,
    MemoryPolicy,
    MemoryView,
    Policy,
    Probe,
    PruningPolicy,
    PruningView,
    RequestPolicy,
    RoutingPolicy,
    RoutingView,
)
from vsched.testing import check_policy
from vsched_policies.memory import AutoProfile, Pinned
from vsched_policies.pruning import MostChanged
from vsched_policies.routing import RoundRobin


class Shortest(RequestPolicy, frozen=True, kw_only=True):
    """A correct user policy that sorts with numpy."""

    most: int = 4

    def admit(self, view: AdmissionView) -> Admission:
        order: Any = np.argsort([entry.tokens or 0 for entry in view.waiting], kind="stable")
        return Admission(order[: min(self.most, view.entries_free)])


def raise_rarely(view: AdmissionView) -> Admission:
    if len(view.waiting) >= 3:
        raise ZeroDivisionError("three are too many")
    return Admission(range(min(len(view.waiting), view.entries_free)))


def propose_too_much(view: EncodingView) -> list[int]:
    return [len(view.items)]


class Remembers(RequestPolicy, frozen=True, kw_only=True):
    """Keeps values outside of its state, which is forbidden."""

    calls: ClassVar[list[int]] = []

    def admit(self, view: AdmissionView) -> Admission:
        self.calls.append(1)
        some = len(self.calls) % 3 or len(view.waiting)
        return Admission(range(min(some, len(view.waiting), view.entries_free)))


class Rates(msgspec.Struct):
    """State of the policies below."""

    calls: int = 0
    sizes: list[int] = []
    text: str = ""


class Learns(RequestPolicy, frozen=True, kw_only=True):
    """Uses its state correctly."""

    state_type = Rates

    def admit(self, view: AdmissionView) -> Admission:
        rates: Rates = view.state
        rates.calls += 1
        rates.sizes = [*rates.sizes, len(view.waiting)][-8:]
        return Admission(range(min(1 + rates.calls % 3, len(view.waiting), view.entries_free)))


class Hoards(Learns, frozen=True, kw_only=True):
    """Remembers every arrival."""

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        view.state.text += "one more, "
        return Admit()


class Overflows(Learns, frozen=True, kw_only=True):
    """Its state grows beyond the limit."""

    def admit(self, view: AdmissionView) -> Admission:
        view.state.text = "x" * (1 << 15)
        return Admission(range(min(len(view.waiting), view.entries_free)))


class LeavesOther(Learns, frozen=True, kw_only=True):
    """Decides the same, but leaves another state each time."""

    calls: ClassVar[list[int]] = []

    def admit(self, view: AdmissionView) -> Admission:
        self.calls.append(1)
        view.state.calls = len(self.calls)
        return Admission(range(min(len(view.waiting), view.entries_free)))


class Dislikes(RequestPolicy, frozen=True, kw_only=True):
    """Fails for requests with something that most do not have."""

    field: str

    def admit(self, view: AdmissionView) -> Admission:
        assert not any(getattr(entry, self.field) for entry in view.waiting), f"a {self.field}"
        return Admission(range(min(len(view.waiting), view.entries_free)))


class NoLimits(Shortest, frozen=True, kw_only=True):
    def encode_limits(self) -> EncodeLimits:
        return EncodeLimits(images=0)


class PrunesAll(PruningPolicy, frozen=True, kw_only=True):
    """Keeps no token, not even of the first group."""

    def prune(self, view: PruningView) -> bytes:
        return bytes(view.changes.nbytes // 4)


class Sorts(RoutingPolicy, frozen=True, kw_only=True):
    """Tries to change its view."""

    def choose(self, view: RoutingView) -> int:
        replicas: Any = view.replicas
        replicas.sort(key=lambda replica: (not replica.healthy, replica.load_tokens))
        return 0


class Proposes(MemoryPolicy, frozen=True, kw_only=True):
    """Ends after one proposal."""

    build: bool = True
    tokens: int = 0
    profile: bool = True

    def plan(self, view: MemoryView) -> MemoryPlan:
        tokens = self.tokens or view.tokens_min
        yield Build(tokens, profile=self.profile) if self.build else Probe(tokens)


class Forgetful(MemoryPolicy, frozen=True, kw_only=True):
    """Returns its build as policies of version 2 did, if ever."""

    probes: int = 1

    def plan(self, view: MemoryView) -> Any:
        for _ in range(self.probes):
            yield Probe(view.tokens_min)
        return Build(view.tokens_min)


class Refuses(MemoryPolicy, frozen=True, kw_only=True):
    reason: str

    def plan(self, view: MemoryView) -> MemoryPlan:
        yield Probe(view.tokens_min)
        raise DeviceOutOfMemory(self.reason)


class IgnoresEncoders(MemoryPolicy, frozen=True, kw_only=True):
    """Retries with less, and never reads the reservations (the fault of LightLLM #1378)."""

    def plan(self, view: MemoryView) -> MemoryPlan:
        free_bytes = min(rank.available_bytes for rank in view.ranks)
        tokens = max(int(0.8 * free_bytes) // view.bytes_per_token, view.tokens_min)
        for _ in range(4):
            build = yield Build(tokens)
            if build.fits:
                return
            tokens = max(int(0.9 * tokens), view.tokens_min)


class WithMargin(MemoryPolicy, frozen=True, kw_only=True):
    """A correct policy of a user's: a given size, and a margin that must stay free."""

    tokens: int = 64
    margin_bytes: int = 1 << 20

    def plan(self, view: MemoryView) -> MemoryPlan:
        yield Build(self.tokens, headroom_bytes=self.margin_bytes)


TOO_LITTLE = limit_message("too little", value=1, limit=2, remedy="wait")


class Misses(RequestPolicy, frozen=True, kw_only=True):
    need: int

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(range(min(len(view.waiting), view.entries_free, self.need)))


@pytest.mark.parametrize(
    "policy",
    [
        Shortest,
        Shortest(most=1),
        Misses(need=2),
        Learns,
        pytest.param(Tallied, marks=pytest.mark.thorough),
        RoundRobin,
        Pinned(tokens=64),
        AutoProfile,
        WithMargin,
        MostChanged(rate=0.5, threshold=0.2),
    ],
    ids=repr,
)
def test_check_policy_passes_a_good_one(policy: type[Policy] | Policy) -> None:
    check_policy(policy, seeds=range(2))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (answering("admission", raise_rarely), "three are too many"),
        (answering("admission", Admission()), "nothing is admitted"),
        (HoldingForEver, "held for over 60 s"),
        *[
            (Dislikes(field=field), f"a {field}")
            for field in ("tenant", "session", "priority", "target_ns", "images", "outputs")
        ],
        (NoLimits, "0 is outside 1 to"),
        (Remembers, "asked again, it answers"),
        (Hoards, "its state grows"),
        (Overflows, "its state is too large"),
        (LeavesOther, "asked again, it leaves"),
        (answering("encoding", propose_too_much), "outside 0 to"),
        (answering("eviction", {}), "policy Answering failed"),
        (answering("preemption", -1), "index -1 is outside"),
        (answering("routing", 0), "replica 0 is down"),
        (answering("routing", 99), "outside 0 to"),
        (answering("routing", SystemExit(0)), "SystemExit: 0"),
        (Sorts, "'tuple' object has no attribute 'sort'"),
        (Proposes(tokens=1 << 60), "does not fit on an empty device"),
        (Forgetful(probes=1 << 40), "it does not end"),
        (Proposes(build=False), "ended without a build"),
        (Forgetful, "returned Build(tokens=16"),
        (Refuses(reason=TOO_LITTLE), "it proves no build: 0 of"),
        (Refuses(reason="no"), "must give value, limit and remedy"),
        (IgnoresEncoders, "it leaves no room for what encode ranks reserve"),
        (Proposes(profile=False), "accepted without a profiling run"),
        (PrunesAll(rate=0.5), "a token of the first group is pruned"),
    ],
    ids=repr,
)
def test_check_policy_names_seed_and_fault(policy: type[Policy] | Policy, words: str) -> None:
    """Including policies that would stop the server."""
    with pytest.raises(PolicyError, match=re.escape(words)) as caught:
        check_policy(policy)
    cls = policy if isinstance(policy, type) else type(policy)
    assert f"{cls.__module__}.{cls.__qualname__}: seed " in str(caught.value)


@each_case(
    ("policy", "words"),
    [
        (Misses, "pass an instance instead of the class"),
        (int, "int: not a subclass of vsched.policy.Policy"),
    ],
)
def test_check_policy_refuses_input_that_cannot_run(policy: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(words)):
        check_policy(policy)
