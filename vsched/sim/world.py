"""What the parts of a simulated engine share: the clock, the faults, the requests sent, and what must never happen."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from vsched.kernel.request import keyed_by_set
from vsched.sim.cost.model import CostModel, EncodeCost, GenerateCost
from vsched.sim.faults.injection import Injector
from vsched.sim.faults.plan import FaultPlan
from vsched.sim.loop.virtual_loop import VirtualLoop
from vsched.sim.network.channel import LinkProfile
from vsched.sim.network.links import Network
from vsched.sim.workload.images import Appearance
from vsched.types import MediaItem

logger = logging.getLogger(__name__)
ORIGIN_NS = 10_000_000_000
"""Time after which a simulated engine has started; by default the times of workloads and faults count from then."""


HINTS_MAX = 5


class StepCosts(Protocol):
    """What says how long steps take, in nanoseconds; a `CostModel`, say."""

    def encode_ns(self, tokens: Sequence[int]) -> float:
        """Return the time of an encoder step with images of these numbers of tokens."""
        ...

    def generate_ns(
        self, *, decodes: int, context: int, prefill: int = 0, pairs: float = 0.0
    ) -> float:
        """Return the time of a generator step."""
        ...

    def swap_ns(self, size: int) -> float:
        """Return the time of copying so many bytes of KV blocks to host memory, or back."""
        ...


QUICK = CostModel(
    name="quick",
    source="round numbers",
    encode=EncodeCost(step_ns=4e6, item_ns=1e6, token_ns=8e4),
    generate=GenerateCost(step_ns=5e6, decode_ns=1e5, context_ns=1e3, prefill_ns=5e4),
)


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take that no cost model of steps knows; `noise` is the relative spread of a step's time."""

    load_ns: int = 200_000_000
    build_ns: int = 5_000_000
    process_ns: int = 2_000_000
    fetch_ns: int = 20_000_000
    noise: float = 0.2


class World:
    """The environment of one simulated engine.

    Attributes:
        rng: Seeds the parts that draw; used only while the world is made, so the order of their draws does not matter.
        origin_ns: When the times of workloads and faults count from.
        injector: Hands out the faults to the parts that they strike.
        launches: How often ranks of each group were started.
        items: Items of requests that were accepted, by the request's number.
        cached: The same under the keys that the embedding cache knows them by.
        by_set: Those keys stand for whole sets of images.
        appearances: What images look like, by key.
        violations: What must never happen and did, in order.
        hints: What may have led to that.
        digests: Of each log that a group has had, the digest of each entry that a rank of it has accepted.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        plan: FaultPlan,
        *,
        costs: StepCosts = QUICK,
        delays: Delays | None = None,
        links: LinkProfile | None = None,
        origin_ns: int = ORIGIN_NS,
    ) -> None:
        self.loop = loop
        self.seed = seed
        self.origin_ns = origin_ns
        self.costs = costs
        self.delays = delays or Delays()
        self.injector = Injector(_moved(plan, origin_ns), loop)
        self.launches: Counter[str] = Counter()
        self.network = Network(
            loop, self.generator("network"), self.injector, profile=links or LinkProfile()
        )
        self.items: dict[int, tuple[MediaItem, ...]] = {}
        self.cached: dict[int, tuple[MediaItem, ...]] = {}
        self.by_set = False
        self.appearances: dict[bytes, Appearance] = {}
        self.violations: list[str] = []
        self.hints: list[str] = []
        self.digests: dict[tuple[str, int], bytes] = {}
        self.violated = asyncio.Event()
        self._pids = itertools.count(1)

    def generator(self, name: str) -> random.Random:
        """Return a generator of its own for a part of the simulation."""
        return random.Random(f"{self.seed} {name}")  # noqa: S311

    def next_pid(self) -> int:
        """Return the number of a new process."""
        return next(self._pids)

    def accept(self, number: int, items: tuple[MediaItem, ...]) -> None:
        """Note what a request holds."""
        self.items[number] = items
        self.cached[number] = keyed_by_set(items) if self.by_set else items
        for item, cached in zip(items, self.cached[number], strict=True):
            if item.key in self.appearances:
                self.appearances[cached.key] = self.appearances[item.key]

    def violate(self, what: str) -> None:
        """Note what must never happen; the simulation goes on, and fails in the end."""
        self.violations.append(f"at {self.loop.time():.9f} s: {what}")
        self.violated.set()

    def violations_and_hints(self) -> list[str]:
        """Return the violations, and the hints where there are any."""
        return [*self.violations, *self.hints[:HINTS_MAX]] if self.violations else []

    def hint(self, what: str) -> None:
        """Note what is suspicious, and does no harm as long as nothing comes of it."""
        self.hints.append(f"at {self.loop.time():.9f} s: {what}")

    def expect(self, condition: object, what: str) -> None:
        """Note a violation unless a condition holds."""
        if not condition:
            self.violate(what)


def _moved(plan: FaultPlan, origin_ns: int) -> FaultPlan:
    """Return a plan whose times count from the beginning of the loop."""
    moved = tuple(
        msgspec.structs.replace(fault, at_ns=fault.at_ns + origin_ns) for fault in plan.faults
    )
    return msgspec.structs.replace(plan, faults=moved)
