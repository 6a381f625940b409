"""Policies for random runs: every built-in with random fields, and adversaries that propose the worst that is legal.

Some have a state that every decision depends on, and fail with their state half changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from zlib import crc32

import msgspec

from tests.unit.kernel.setups import Gathering
from vsched.policy import (
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    CachePolicy,
    Dispatch,
    DispatchView,
    Draft,
    DraftingPolicy,
    DraftingView,
    EncodingView,
    EvictionOrder,
    Hold,
    ImagePolicy,
    InsertionView,
    Preemption,
    PreemptionView,
    ReclaimView,
    Redirect,
    RequestPolicy,
    RoutingPolicy,
    RoutingView,
    Shed,
    StepShares,
    StepView,
)
from vsched.policy.measured import Measured
from vsched.policy_host import SeatPolicies
from vsched.testing.cluster import default_policies
from vsched_policies.admission import Fifo, Priority, ShortestFirst, Tiers, TokenBudget
from vsched_policies.arrival import DeadlineShed, Open
from vsched_policies.dispatch import FewestHeldUp
from vsched_policies.drafting import ForcedTokens, NoDrafts, PromptLookup
from vsched_policies.encoding import ChunkAware
from vsched_policies.eviction import KeepNothing, Lru, S3Fifo
from vsched_policies.insertion import Everything, Matching
from vsched_policies.preemption import Youngest
from vsched_policies.reclaim import YoungestEmbedding
from vsched_policies.requests import TenantFair
from vsched_policies.routing import RoundRobin
from vsched_policies.step import InOrder, SloFeedback


class Recent(msgspec.Struct):
    """Subjects of the last calls."""

    sizes: list[int] = []
    place: tuple[int, str] = (0, "")


class Tally(msgspec.Struct):
    """State of these policies: a field of every kind that can be kept."""

    calls: int = 0
    share: float = 0.0
    note: str | None = None
    seen: dict[str, int] = {}
    recent: Recent = msgspec.field(default_factory=Recent)

    def count(self, what: str, size: int) -> int:
        """Count a call; return a number that depends on all calls before."""
        self.calls += 1
        self.share += (size - self.share) / 4
        self.note = what if self.calls % 2 else None
        self.seen.pop(what, None)
        self.seen[what] = self.seen.get(what, 0) + size  # it becomes the last
        self.recent.sizes = [*self.recent.sizes[-3:], size]
        self.recent.place = (size, what)
        return self.calls + int(self.share) + next(iter(self.seen.values()))

    def fail_at(self, every: int) -> None:
        """Fail in every n-th call, 0 for never."""
        if every and self.calls % every == 0:
            raise RuntimeError("a bug in the policy")


def tally(fails: int, view: Any, what: str, size: int) -> int:
    """Count a call in the state, and fail in every n-th; return a number that depends on all calls and measurements."""
    state: Tally = view.state
    number = state.count(what, size + digest(view.measured))
    state.fail_at(fails)
    return number


def digest(measured: Measured) -> int:
    """Return a small number to which all measurements contribute."""
    reported = [
        list(map(msgspec.structs.astuple, window))
        for window in (measured.steps, measured.encodes, measured.first_tokens, measured.ends)
    ]
    counts = [
        measured.blocks_total,
        measured.blocks_held,
        measured.blocks_cached,
        measured.tokens_prefilled,
        measured.tokens_cached,
        *measured.tokens_running.values(),
        measured.embedding_hits,
        measured.embedding_misses,
    ]
    return crc32(msgspec.msgpack.encode([reported, counts])) % 1000


class TalliedAdmission(RequestPolicy, frozen=True, kw_only=True):
    """Admits a number that depends on its state, from the front or from the back."""

    state_type = Tally
    fails: int = 0

    def admit(self, view: AdmissionView) -> Admission:
        number = tally(self.fails, view, view.stage, len(view.waiting))
        order = range(len(view.waiting))
        chosen = order if number % 3 else order[::-1]
        return Admission(list(chosen)[: 1 + number % max(view.entries_free, 1)])


class TalliedEncoding(ImagePolicy, frozen=True, kw_only=True):
    """Encodes ahead by a number that depends on its state."""

    state_type = Tally
    fails: int = 0

    def select(self, view: EncodingView) -> Sequence[int]:
        number = tally(self.fails, view, str(view.arriving), view.prompt_tokens)
        return [index for index, item in enumerate(view.items) if not item.ready][: number % 3]


class TalliedPreemption(RequestPolicy, frozen=True, kw_only=True):
    """The victim follows from the calls before."""

    state_type = Tally
    fails: int = 0

    def victim(self, view: PreemptionView) -> int:
        number = tally(self.fails, view, "victim", len(view.running))
        return number % len(view.running)


class TalliedRouting(RoutingPolicy, frozen=True, kw_only=True):
    """A healthy replica that follows from the calls before."""

    state_type = Tally
    fails: int = 0

    def choose(self, view: RoutingView) -> int:
        measured = sum(digest(replica.measured) for replica in view.replicas)
        number = tally(self.fails, view, str(len(view.item_keys)), measured)
        healthy = [replica.index for replica in view.replicas if replica.healthy]
        return healthy[number % len(healthy)] if healthy else 0


class Reversed(RequestPolicy, frozen=True, kw_only=True):
    """Last come, first served."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(list(reversed(range(len(view.waiting))))[: view.entries_free])


class LastAlone(RequestPolicy, frozen=True, kw_only=True):
    """Only the last of the queue, and none while any request runs."""

    patient: bool = False

    def admit(self, view: AdmissionView) -> Admission:
        if self.patient and view.running:
            return Admission()
        return Admission([len(view.waiting) - 1])


class Holding(RequestPolicy, frozen=True, kw_only=True):
    """Refuses everything, however often it is called, until the oldest has waited long enough."""

    for_ns: int = 1_000_000
    step_ns: int = 50_000

    def admit(self, view: AdmissionView) -> Admission:
        oldest_ns = min(entry.arrived_ns for entry in view.waiting)
        if view.now_ns >= oldest_ns + self.for_ns:
            return Admission(range(min(len(view.waiting), view.entries_free)))
        return Admission(hold_until_ns=view.now_ns + self.step_ns)


class HoldingForEver(RequestPolicy, frozen=True, kw_only=True):
    """Never admits a request: it is overruled when an entry has waited for a minute."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(hold_until_ns=view.now_ns + 1_000_000_000)


class HoldingBack(RequestPolicy, frozen=True, kw_only=True):
    """Alternates between holding all and admitting only the last; or does both at once, which is not legal."""

    both: bool = False

    def admit(self, view: AdmissionView) -> Admission:
        last = [len(view.waiting) - 1]
        if self.both:
            return Admission(last, hold_until_ns=view.now_ns + 300_000)
        if view.now_ns // 300_000 % 2:
            return Admission(hold_until_ns=view.now_ns + 100_000)
        return Admission(last)


class Shuffling(RequestPolicy, frozen=True, kw_only=True):
    """Any order, sometimes none, an index out of range, a duplicate, or an error."""

    wrong: int = 0

    def admit(self, view: AdmissionView) -> Admission:
        rng = random.Random(view.now_ns)
        count = len(view.waiting)
        if rng.randrange(100) < self.wrong:
            bad = [Admission([count]), Admission([-1]), Admission([0, 0]), Admission((), 0)]
            if rng.random() < 0.5:
                raise RuntimeError("a bug in the policy")
            return rng.choice(bad)
        if view.running and rng.random() < 0.3:
            return Admission()
        return Admission(rng.sample(range(count), rng.randint(1, count)))


class Scattered(ImagePolicy, frozen=True, kw_only=True):
    """Any items, ready or not, sometimes invalid ones."""

    wrong: int = 0

    def select(self, view: EncodingView) -> Sequence[int]:
        rng = random.Random(view.chunk_stop + len(view.items))
        if rng.randrange(100) < self.wrong:
            return [len(view.items)]
        return rng.sample(range(len(view.items)), rng.randint(0, len(view.items)))


class FromTheEnd(ImagePolicy, frozen=True, kw_only=True):
    """The last item first: the one that is needed last."""

    def select(self, view: EncodingView) -> Sequence[int]:
        return [len(view.items) - 1]


class Stubborn(CachePolicy, frozen=True, kw_only=True):
    """Evicts the newest, keeps some, and fails after a number of calls."""

    calls: int = 1 << 30
    keeps: int = 100

    def build_order(self) -> EvictionOrder[Hashable]:
        return StubbornOrder(self.calls, self.keeps)


class StubbornOrder:
    def __init__(self, calls: int, keeps: int) -> None:
        self._calls = calls
        self._keeps = keeps
        self._keys: list[Hashable] = []

    def add(self, key: Hashable, size: int) -> bool:
        self._count()
        if len(self._keys) >= self._keeps:
            return False
        self._keys.append(key)
        return True

    def reuse(self, key: Hashable) -> None:
        self._count()
        self._keys.remove(key)

    def drop(self, key: Hashable) -> None:
        self._count()
        self._keys.remove(key)

    def victim(self) -> Hashable:
        self._count()
        return self._keys[-1]

    def _count(self) -> None:
        self._calls -= 1
        if self._calls < 0:
            raise RuntimeError("a bug in the policy")

    def state(self) -> object:
        return [self._calls, self._keeps, self._keys]

    def restore(self, state: Any) -> None:
        self._calls, self._keeps, self._keys = state

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._keys)


class Oldest(RequestPolicy, frozen=True, kw_only=True):
    """Always the oldest, which must go on."""

    def victim(self, view: PreemptionView) -> int:
        return 0


class AnyVictim(RequestPolicy, frozen=True, kw_only=True):
    """Any victim, in any mode, or an index out of range."""

    wrong: int = 0

    def victim(self, view: PreemptionView) -> int | Preemption:
        rng = random.Random(view.now_ns)
        if rng.randrange(100) < self.wrong:
            return len(view.running)
        index = rng.randrange(len(view.running))
        return index if rng.randrange(4) == 0 else Preemption(index, "swap")


WRONG = (0, 10, 60)


def random_admission(rng: random.Random) -> RequestPolicy:
    budget = rng.choice([None, 0, 1, 10, 64])
    items = rng.choice([1, 2, 8])
    seconds = rng.choice([0.0, 0.000_01, 0.001, 0.1, 10.0])
    makers: list[Callable[[], RequestPolicy]] = [
        Fifo,
        lambda: TokenBudget(max_tokens=budget, max_items=items),
        lambda: Gathering(count=items, deadline_s=seconds),
        lambda: Priority(max_tokens=budget, max_items=items, ageing_s=seconds),
        lambda: Tiers(ageing_s=seconds, mode=rng.choice(["recompute", "swap"])),
        lambda: TenantFair(output_weight=rng.choice([1, 5]), max_items=rng.choice([None, 1])),
        lambda: ShortestFirst(ageing_s=rng.choice([0.001, 10.0]), forget=rng.choice([0.1, 1.0])),
        Reversed,
        lambda: LastAlone(patient=rng.random() < 0.5),
        lambda: Holding(for_ns=rng.choice([10_000, 1_000_000])),
        HoldingForEver,
        lambda: HoldingBack(both=rng.random() < 0.3),
        lambda: Shuffling(wrong=rng.choice(WRONG)),
        lambda: TalliedAdmission(fails=rng.choice([0, 2, 5])),
    ]
    return rng.choice(makers)()


def random_encoding(rng: random.Random) -> ImagePolicy:
    ahead = rng.choice([0, 1, 3, 100])
    makers: list[Callable[[], ImagePolicy]] = [
        lambda: ChunkAware(look_ahead_chunks=ahead),
        lambda: Scattered(wrong=rng.choice(WRONG)),
        FromTheEnd,
        lambda: TalliedEncoding(fails=rng.choice([0, 2, 5])),
    ]
    return rng.choice(makers)()


def random_eviction(rng: random.Random) -> CachePolicy:
    makers: list[Callable[[], CachePolicy]] = [
        Lru,
        lambda: S3Fifo(small_share=rng.choice([0.1, 0.5, 1.0]), ghosts=rng.choice([0, 2, 1024])),
        KeepNothing,
        lambda: Stubborn(calls=rng.choice([0, 10, 1 << 30]), keeps=rng.choice([1, 100])),
    ]
    return rng.choice(makers)()


def random_preemption(rng: random.Random) -> RequestPolicy:
    makers: list[Callable[[], RequestPolicy]] = [
        Youngest,
        Oldest,
        lambda: TalliedPreemption(fails=rng.choice([0, 2, 5])),
        lambda: AnyVictim(wrong=rng.choice(WRONG)),
    ]
    return rng.choice(makers)()


class AnyReplica(RoutingPolicy, frozen=True, kw_only=True):
    """Any replica, healthy or not; sometimes one that does not exist."""

    wrong: int = 0

    def choose(self, view: RoutingView) -> int:
        if self.wrong and view.routed % 3 == 0:
            return self.wrong
        return (view.routed * 7 + view.prompt_tokens) % len(view.replicas)


def random_routing(rng: random.Random) -> RoutingPolicy:
    makers: list[Callable[[], RoutingPolicy]] = [
        RoundRobin,
        lambda: TalliedRouting(fails=rng.choice([0, 2, 5])),
        AnyReplica,
        lambda: AnyReplica(wrong=rng.choice(WRONG)),
    ]
    return rng.choice(makers)()


class AnyGrant(DraftingPolicy, frozen=True, kw_only=True):
    """Any number of tokens for any number of steps; sometimes an invalid grant."""

    tokens: int = 8
    steps: int = 3
    wrong: int = 0

    def grant(self, view: DraftingView) -> Draft:
        if self.wrong and view.outputs % 3 == 0:
            return Draft(self.wrong)
        return Draft(
            (view.outputs * 7 + self.tokens) % (self.tokens + 1),
            view.outputs % (self.steps + 1),
            1,
            model=view.outputs % 2 == 0,
        )


def random_drafting(rng: random.Random) -> DraftingPolicy:
    makers: list[Callable[[], DraftingPolicy]] = [
        NoDrafts,
        ForcedTokens,
        lambda: PromptLookup(steps=rng.randint(1, 4), tokens=rng.randint(1, 8)),
        lambda: AnyGrant(tokens=rng.randint(1, 8), steps=rng.randint(0, 5)),
        lambda: AnyGrant(wrong=rng.choice(WRONG)),
    ]
    return rng.choice(makers)()


class AnyShares(RequestPolicy, frozen=True, kw_only=True):
    """Any order of some requests, by any number of tokens, in any time; or none, or an illegal decision."""

    wrong: int = 0

    def share(self, view: StepView) -> StepShares:
        rng = random.Random(view.now_ns)
        count = len(view.prefilling)
        if rng.randrange(100) < self.wrong:
            return rng.choice([StepShares([count]), StepShares([0, 0]), StepShares([], [1])])
        order = rng.sample(range(count), rng.randint(0, count))
        tokens = [rng.choice([0, 1, 7, 500]) for _ in order] if rng.random() < 0.5 else None
        return StepShares(order, tokens, rng.choice([None, 0, 1_000, 10**9]))


class TalliedShares(RequestPolicy, frozen=True, kw_only=True):
    """The order follows from the calls before."""

    state_type = Tally
    fails: int = 0

    def share(self, view: StepView) -> StepShares:
        number = tally(self.fails, view, "share", view.decodes)
        order = list(range(len(view.prefilling)))
        return StepShares(order[:: -1 if number % 2 else 1], time_ns=number * 100)


def random_step(rng: random.Random) -> RequestPolicy:
    makers: list[Callable[[], RequestPolicy]] = [
        InOrder,
        lambda: TenantFair(quantum_tokens=rng.choice([1, 7, 256])),
        lambda: SloFeedback(itl_target_ms=rng.choice([1, 50]), least_ms=0.001, gain=0.5),
        lambda: AnyShares(wrong=rng.choice(WRONG)),
        lambda: TalliedShares(fails=rng.choice([0, 2, 5])),
    ]
    return rng.choice(makers)()


class AnyDoor(RequestPolicy, frozen=True, kw_only=True):
    """Any decision, by the time; or an illegal one."""

    wrong: int = 0

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        rng = random.Random(view.now_ns)
        if rng.randrange(100) < self.wrong:
            wrong: list[ArrivalDecision] = [Hold(view.now_ns), Shed(""), Redirect("ftp://other")]
            return rng.choice(wrong)
        hold = Hold(view.now_ns + rng.choice([1, 10_000, 10_000_000]))
        late = view.now_ns > view.request.arrived_ns + 10_000_000_000
        choices: list[ArrivalDecision] = [Admit(), Admit(), Shed("no"), Admit() if late else hold]
        return rng.choice(choices)


class TalliedDoor(RequestPolicy, frozen=True, kw_only=True):
    """Holds follow from the calls before."""

    state_type = Tally
    fails: int = 0

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        inside = view.held + view.preparing + view.waiting + view.running + view.tenant_requests
        number = tally(self.fails, view, "door", inside + view.load_tokens)
        if view.request.asks > 3 or number % 3 == 0:
            return Admit()
        return Shed("no", 1 + number % 9) if number % 7 == 0 else Hold(view.now_ns + number)


def random_arrival(rng: random.Random) -> RequestPolicy:
    makers: list[Callable[[], RequestPolicy]] = [
        Open,
        lambda: TenantFair(rate=rng.choice([1, 1e4]), burst=rng.randint(1, 4), wait_s=rng.random()),
        lambda: DeadlineShed(ttft_target_ms=rng.choice([1, 2000, None])),
        lambda: AnyDoor(wrong=rng.choice(WRONG)),
        lambda: TalliedDoor(fails=rng.choice([0, 2, 5])),
    ]
    return rng.choice(makers)()


class AnyDispatch(ImagePolicy, frozen=True, kw_only=True):
    """Any free group and any waiting images, or none while others are encoded; or an illegal decision."""

    wrong: int = 0

    def dispatch(self, view: DispatchView) -> Dispatch:
        rng = random.Random(view.now_ns)
        count = len(view.waiting)
        if rng.randrange(100) < self.wrong:
            return rng.choice([Dispatch(len(view.groups)), Dispatch(None), Dispatch(0, [count])])
        free = [index for index, group in enumerate(view.groups) if group.free]
        if any(group.items for group in view.groups) and rng.random() < 0.3:
            return Dispatch(None)
        order = rng.sample(range(count), rng.randint(1, count)) if rng.random() < 0.7 else None
        return Dispatch(rng.choice(free), order)


class TalliedDispatch(ImagePolicy, frozen=True, kw_only=True):
    """The order of images follows from the calls before."""

    state_type = Tally
    fails: int = 0

    def dispatch(self, view: DispatchView) -> Dispatch:
        number = tally(self.fails, view, "dispatch", len(view.waiting))
        free = [index for index, group in enumerate(view.groups) if group.free]
        order = list(range(len(view.waiting)))
        return Dispatch(free[number % len(free)], order[:: -1 if number % 2 else 1])


def random_dispatch(rng: random.Random) -> ImagePolicy:
    makers: list[Callable[[], ImagePolicy]] = [
        FewestHeldUp,
        lambda: AnyDispatch(wrong=rng.choice(WRONG)),
        lambda: TalliedDispatch(fails=rng.choice([0, 2, 5])),
    ]
    return rng.choice(makers)()


class AnyEmbeddings(ImagePolicy, frozen=True, kw_only=True):
    """Any of them, or none, or an index out of range, or a duplicate."""

    wrong: int = 0

    def reclaim(self, view: ReclaimView) -> Sequence[int]:
        rng = random.Random(view.now_ns)
        count = len(view.ready)
        if rng.randrange(100) < self.wrong:
            return rng.choice([[count], [0, 0]])
        return rng.sample(range(count), rng.randint(0, count))


class TalliedReclaim(ImagePolicy, frozen=True, kw_only=True):
    """The evicted embedding follows from the calls before."""

    state_type = Tally
    fails: int = 0

    def reclaim(self, view: ReclaimView) -> Sequence[int]:
        number = tally(self.fails, view, "choose", view.pages)
        return list(range(len(view.ready)))[:: -1 if number % 2 else 1]


def random_reclaim(rng: random.Random) -> ImagePolicy:
    makers: list[Callable[[], ImagePolicy]] = [
        YoungestEmbedding,
        lambda: AnyEmbeddings(wrong=rng.choice(WRONG)),
        lambda: TalliedReclaim(fails=rng.choice([0, 2, 5])),
    ]
    return rng.choice(makers)()


class AnyBlocks(CachePolicy, frozen=True, kw_only=True):
    """Any number of blocks, or one too many."""

    wrong: int = 0

    def keep(self, view: InsertionView) -> int:
        rng = random.Random(view.now_ns)
        count = len(view.hashes)
        return count + 1 if rng.randrange(100) < self.wrong else rng.randint(0, count)


class TalliedInsertion(CachePolicy, frozen=True, kw_only=True):
    """The number of blocks follows from the calls before."""

    state_type = Tally
    fails: int = 0

    def keep(self, view: InsertionView) -> int:
        number = tally(self.fails, view, "keep", len(view.hashes))
        return number % (len(view.hashes) + 1)


def random_insertion(rng: random.Random) -> CachePolicy:
    makers: list[Callable[[], CachePolicy]] = [
        Everything,
        lambda: Matching(tokens_min=rng.choice([0, 20]), tokens_max=rng.choice([None, 40])),
        lambda: AnyBlocks(wrong=rng.choice(WRONG)),
        lambda: TalliedInsertion(fails=rng.choice([0, 2, 5])),
    ]
    return rng.choice(makers)()


def random_policies(rng: random.Random) -> SeatPolicies:
    """Return any combination."""
    return default_policies(
        encode_admission=random_admission(rng),
        generate_admission=random_admission(rng),
        encoding=random_encoding(rng),
        dispatch=random_dispatch(rng),
        encode_eviction=random_eviction(rng),
        reclaim=random_reclaim(rng),
        generate_eviction=random_eviction(rng),
        insertion=random_insertion(rng),
        preemption=random_preemption(rng),
        routing=random_routing(rng),
        drafting=random_drafting(rng),
        step=random_step(rng),
        arrival=random_arrival(rng),
    )
