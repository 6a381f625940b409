"""Policies for random runs: every built-in with random fields, and adversaries that propose the worst that is legal.

Some have a state that every decision depends on, and fail with their state half changed; `Locked` has one that
cannot be recorded.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Hashable, Sequence
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
    Policy,
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
from vsched_policies.eviction import KeepNothing, Lru, LruOrder, S3Fifo
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


def tally(fails: int, view: Any, what: str, size: int) -> int:
    """Count a call in the state, and fail in every n-th; return a number that depends on all calls and measurements."""
    number: int = view.state.count(what, size + digest(view.measured))
    if fails and view.state.calls % fails == 0:
        raise RuntimeError("a bug in the policy")
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


class Every(
    RequestPolicy,
    ImagePolicy,
    RoutingPolicy,
    CachePolicy,
    DraftingPolicy,
    frozen=True,
    kw_only=True,
):
    """Base of the policies that make every decision."""


class Tallied(Every, frozen=True, kw_only=True):
    """Each decision follows from all calls before and from all measurements; every n-th call fails, 0 for none."""

    state_type = Tally
    fails: int = 0

    def admit(self, view: AdmissionView) -> Admission:
        number = tally(self.fails, view, view.stage, len(view.waiting))
        order = range(len(view.waiting))
        chosen = order if number % 3 else order[::-1]
        return Admission(list(chosen)[: 1 + number % max(view.entries_free, 1)])

    def select(self, view: EncodingView) -> Sequence[int]:
        number = tally(self.fails, view, str(view.arriving), view.prompt_tokens)
        return [index for index, item in enumerate(view.items) if not item.ready][: number % 3]

    def victim(self, view: PreemptionView) -> int:
        return tally(self.fails, view, "victim", len(view.running)) % len(view.running)

    def choose(self, view: RoutingView) -> int:
        measured = sum(digest(replica.measured) for replica in view.replicas)
        number = tally(self.fails, view, str(len(view.item_keys)), measured)
        healthy = [replica.index for replica in view.replicas if replica.healthy]
        return healthy[number % len(healthy)] if healthy else 0

    def share(self, view: StepView) -> StepShares:
        number = tally(self.fails, view, "share", view.decodes)
        order = list(range(len(view.prefilling)))
        return StepShares(order[:: -1 if number % 2 else 1], time_ns=number * 100)

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        inside = view.held + view.preparing + view.waiting + view.running + view.tenant_requests
        number = tally(self.fails, view, "arrive", inside + view.load_tokens)
        if view.request.asks > 3 or number % 3 == 0:
            return Admit()
        return Shed("no", 1 + number % 9) if number % 7 == 0 else Hold(view.now_ns + number)

    def dispatch(self, view: DispatchView) -> Dispatch:
        number = tally(self.fails, view, "dispatch", len(view.waiting))
        free = [index for index, group in enumerate(view.groups) if group.free]
        order = list(range(len(view.waiting)))
        return Dispatch(free[number % len(free)], order[:: -1 if number % 2 else 1])

    def reclaim(self, view: ReclaimView) -> Sequence[int]:
        number = tally(self.fails, view, "choose", view.pages)
        return list(range(len(view.ready)))[:: -1 if number % 2 else 1]

    def keep(self, view: InsertionView) -> int:
        return tally(self.fails, view, "keep", len(view.hashes)) % (len(view.hashes) + 1)


class Anything(Every, frozen=True, kw_only=True):
    """Any legal decision; `wrong` of a hundred are invalid, or an error."""

    wrong: int = 0

    def _draw(self, view: Any, count: int, *invalid: Any) -> tuple[random.Random, Any]:
        """Return the generator of a call, and the invalid answer that it gives, if any."""
        rng = random.Random(view.now_ns + count)
        if rng.randrange(100) >= self.wrong:
            return rng, None
        if rng.random() < 0.3:
            raise RuntimeError("a bug in the policy")
        return rng, rng.choice(invalid)

    def admit(self, view: AdmissionView) -> Admission:
        count = len(view.waiting)
        until_ns = view.now_ns + 300_000
        bad = Admission([count]), Admission([-1]), Admission([0, 0]), Admission([0], until_ns)
        rng, invalid = self._draw(view, count, *bad)
        if invalid is None and view.running and rng.random() < 0.3:
            return rng.choice([Admission(), Admission(hold_until_ns=until_ns)])
        return invalid or Admission(rng.sample(range(count), rng.randint(1, count)))

    def select(self, view: EncodingView) -> Sequence[int]:
        count = len(view.items)
        rng, invalid = self._draw(view, count, [count])
        return invalid or rng.sample(range(count), rng.randint(0, count))

    def victim(self, view: PreemptionView) -> int | Preemption:
        count = len(view.running)
        rng, invalid = self._draw(view, count, count)
        index = rng.randrange(count)
        return invalid or (index if rng.randrange(4) == 0 else Preemption(index, "swap"))

    def choose(self, view: RoutingView) -> int:
        rng, invalid = self._draw(view, view.routed, 10)
        return invalid or rng.randrange(len(view.replicas))

    def share(self, view: StepView) -> StepShares:
        count = len(view.prefilling)
        bad = StepShares([count]), StepShares([0, 0]), StepShares([], [1])
        rng, invalid = self._draw(view, count, *bad)
        order = rng.sample(range(count), rng.randint(0, count))
        tokens = [rng.choice([0, 1, 7, 500]) for _ in order] if rng.random() < 0.5 else None
        return invalid or StepShares(order, tokens, rng.choice([None, 0, 1_000, 10**9]))

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        bad = Hold(view.now_ns), Shed(""), Redirect("ftp://other")
        rng, invalid = self._draw(view, view.held, *bad)
        hold = Hold(view.now_ns + rng.choice([1, 10_000, 10_000_000]))
        late = view.now_ns > view.request.arrived_ns + 10_000_000_000
        return invalid or rng.choice([Admit(), Admit(), Shed("no"), Admit() if late else hold])

    def dispatch(self, view: DispatchView) -> Dispatch:
        count = len(view.waiting)
        bad = Dispatch(len(view.groups)), Dispatch(None, ()), Dispatch(0, [count])
        rng, invalid = self._draw(view, count, *bad)
        free = [index for index, group in enumerate(view.groups) if group.free]
        if invalid is None and any(one.items for one in view.groups) and rng.random() < 0.3:
            return Dispatch(None)
        order = rng.sample(range(count), rng.randint(1, count)) if rng.random() < 0.7 else None
        return invalid or Dispatch(rng.choice(free), order)

    def reclaim(self, view: ReclaimView) -> Sequence[int]:
        count = len(view.ready)
        rng, invalid = self._draw(view, count, [count], [0, 0])
        return invalid or rng.sample(range(count), rng.randint(0, count))

    def keep(self, view: InsertionView) -> int:
        count = len(view.hashes)
        rng, invalid = self._draw(view, count, count + 1)
        return invalid or rng.randint(0, count)

    def grant(self, view: DraftingView) -> Draft:
        rng, invalid = self._draw(view, view.outputs, Draft(-1), Draft(60))
        return invalid or Draft(rng.randint(0, 8), rng.randint(0, 5), 1, rng.random() < 0.5)


class Reversed(RequestPolicy, frozen=True, kw_only=True):
    """Last come, first served."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(list(reversed(range(len(view.waiting))))[: view.entries_free])


class AllWaiting(RequestPolicy, frozen=True, kw_only=True):
    """Proposes all waiting entries, whatever is free."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(range(len(view.waiting)))


class HoldingForEver(RequestPolicy, frozen=True, kw_only=True):
    """Never admits a request: it is overruled when an entry has waited for a minute."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(hold_until_ns=view.now_ns + 1_000_000_000)


class Stubborn(CachePolicy, frozen=True, kw_only=True):
    """Evicts the newest, keeps some, and fails after a number of calls."""

    calls: int = 1 << 30
    keeps: int = 100

    def build_order(self) -> EvictionOrder[Hashable]:
        return StubbornOrder(self.calls, self.keeps)


class StubbornOrder(LruOrder[Hashable]):
    def __init__(self, calls: int, keeps: int) -> None:
        super().__init__()
        self._calls, self._keeps = calls, keeps

    def add(self, key: Hashable, size: int) -> bool:
        self._count()
        return len(self) < self._keeps and super().add(key, size)

    def reuse(self, key: Hashable) -> None:
        self._count()
        super().reuse(key)

    def drop(self, key: Hashable) -> None:
        self._count()
        super().drop(key)

    def victim(self) -> Hashable:
        self._count()
        return list(self)[-1]

    def _count(self) -> None:
        self._calls -= 1
        if self._calls < 0:
            raise RuntimeError("a bug in the policy")

    def state(self) -> list[Any]:
        return [self._calls, self._keeps, super().state()]

    def restore(self, state: list[Any]) -> None:
        self._calls, self._keeps, keys = state
        super().restore(keys)


class LockedOrder(LruOrder[Hashable]):
    """Holds a lock, which cannot be recorded, from the first addition on."""

    lock: Any = None

    def add(self, key: Hashable, size: int) -> bool:
        self.lock = threading.Lock()
        return super().add(key, size)

    def state(self) -> list[Any]:
        return [super().state(), self.lock]

    def restore(self, state: list[Any]) -> None:
        super().restore(state[0])


class Locked(CachePolicy, frozen=True, kw_only=True):
    """Its order cannot be recorded; with `early`, from the start."""

    early: bool = False

    def build_order(self) -> EvictionOrder[Hashable]:
        order = LockedOrder()
        if self.early:
            order.lock = threading.Lock()
        return order


Maker = Callable[[random.Random], Policy]
ADVERSARIES: list[Maker] = [
    lambda rng: Anything(wrong=rng.choice([0, 10, 60])),
    lambda rng: Tallied(fails=rng.choice([0, 2, 5])),
]


def random_admission(rng: random.Random) -> Policy:
    budget = rng.choice([None, 0, 1, 10, 64])
    items = rng.choice([1, 2, 8])
    seconds = rng.choice([0.0, 0.000_01, 0.001, 0.1, 10.0])
    makers: list[Maker] = [
        lambda _: Fifo(),
        lambda _: TokenBudget(max_tokens=budget, max_items=items),
        lambda _: Gathering(count=items, deadline_s=seconds),
        lambda _: Priority(max_tokens=budget, max_items=items, ageing_s=seconds),
        lambda rng: Tiers(ageing_s=seconds, mode=rng.choice(["recompute", "swap"])),
        lambda rng: TenantFair(output_weight=rng.choice([1, 5]), max_items=rng.choice([None, 1])),
        lambda rng: ShortestFirst(
            ageing_s=rng.choice([0.001, 10.0]), forget=rng.choice([0.1, 1.0])
        ),
        lambda _: Reversed(),
        lambda _: HoldingForEver(),
        *ADVERSARIES,
    ]
    return rng.choice(makers)(rng)


def random_eviction(rng: random.Random) -> Policy:
    makers: list[Maker] = [
        lambda _: Lru(),
        lambda rng: S3Fifo(
            small_share=rng.choice([0.1, 0.5, 1.0]), ghosts=rng.choice([0, 2, 1024])
        ),
        lambda _: KeepNothing(),
        lambda rng: Stubborn(calls=rng.choice([0, 10, 1 << 30]), keeps=rng.choice([1, 100])),
    ]
    return rng.choice(makers)(rng)


OTHERS: dict[str, list[Maker]] = {
    "encoding": [lambda rng: ChunkAware(look_ahead_chunks=rng.choice([0, 1, 3, 100]))],
    "dispatch": [lambda _: FewestHeldUp()],
    "reclaim": [lambda _: YoungestEmbedding()],
    "insertion": [
        lambda _: Everything(),
        lambda rng: Matching(tokens_min=rng.choice([0, 20]), tokens_max=rng.choice([None, 40])),
    ],
    "preemption": [lambda _: Youngest()],
    "routing": [lambda _: RoundRobin()],
    "drafting": [
        lambda _: NoDrafts(),
        lambda _: ForcedTokens(),
        lambda rng: PromptLookup(steps=rng.randint(1, 4), tokens=rng.randint(1, 8)),
    ],
    "step": [
        lambda _: InOrder(),
        lambda rng: TenantFair(quantum_tokens=rng.choice([1, 7, 256])),
        lambda _: SloFeedback(itl_target_ms=1, least_ms=0.001, gain=0.5),
    ],
    "arrival": [
        lambda _: Open(),
        lambda rng: TenantFair(
            rate=rng.choice([1, 1e4]), burst=rng.randint(1, 4), wait_s=rng.random()
        ),
        lambda rng: DeadlineShed(ttft_target_ms=rng.choice([1, 2000, None])),
    ],
}


def random_policies(rng: random.Random) -> SeatPolicies:
    drafts = ADVERSARIES[:1]
    return default_policies(
        encode_admission=random_admission(rng),
        generate_admission=random_admission(rng),
        encode_eviction=random_eviction(rng),
        generate_eviction=random_eviction(rng),
        **{
            kind: rng.choice([*makers, *(drafts if kind == "drafting" else ADVERSARIES)])(rng)
            for kind, makers in OTHERS.items()
        },
    )
