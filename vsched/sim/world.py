"""State shared by the parts of a simulated engine: clock, fault injection, requests sent, and violations found."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter

import msgspec

from vsched.sim.cost.model import CostModel, EncodeCost, GenerateCost
from vsched.sim.faults import FaultPlan, Injector
from vsched.sim.loop import VirtualLoop
from vsched.sim.network.links import LinkProfile, Network
from vsched.sim.workload.images import Appearance
from vsched.types import MediaItem

logger = logging.getLogger(__name__)
ORIGIN_NS = 10_000_000_000
"""Virtual time by which a simulated engine has started; workload and fault times count from it by default."""
HINTS_MAX = 5


QUICK = CostModel(
    name="quick",
    source="round numbers",
    encode=EncodeCost(step_ns=4e6, item_ns=1e6, token_ns=8e4),
    generate=GenerateCost(step_ns=5e6, decode_ns=1e5, context_ns=1e3, prefill_ns=5e4),
)


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Durations outside the step cost model; `noise` is the relative spread of step times."""

    load_ns: int = 200_000_000
    build_ns: int = 5_000_000
    process_ns: int = 2_000_000
    fetch_ns: int = 20_000_000
    noise: float = 0.2


class World:
    """The environment of one simulated engine.

    Attributes:
        rng: Seeds the random generators of the parts; used only during construction, so the order
            of draws does not matter.
        origin_ns: Origin of workload and fault times.
        injector: Injects the planned faults.
        launches: Number of times the ranks of each group were started.
        items: Images of accepted requests, by request number.
        appearances: Simulated image contents, by key.
        violations: Broken invariants, in order.
        hints: Suspicious events that may explain a violation.
        digests: For each decision log of a group, the digest of every entry that one of its ranks
            has accepted.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        plan: FaultPlan,
        *,
        costs: CostModel = QUICK,
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
        self.appearances: dict[bytes, Appearance] = {}
        self.violations: list[str] = []
        self.hints: list[str] = []
        self.digests: dict[tuple[str, int], bytes] = {}
        self.violated = asyncio.Event()
        self._pids = itertools.count(1)

    def generator(self, name: str) -> random.Random:
        """Return a separate random generator for a named part of the simulation."""
        return random.Random(f"{self.seed} {name}")  # noqa: S311

    def next_pid(self) -> int:
        """Return a new process id."""
        return next(self._pids)

    def violate(self, what: str) -> None:
        """Record a broken invariant; the simulation continues and fails at the end."""
        self.violations.append(f"at {self.loop.time():.9f} s: {what}")
        self.violated.set()

    def violations_and_hints(self) -> list[str]:
        """Return the violations, followed by hints if there are violations."""
        return [*self.violations, *self.hints[:HINTS_MAX]] if self.violations else []

    def hint(self, what: str) -> None:
        """Record a suspicious event, reported only together with a violation."""
        self.hints.append(f"at {self.loop.time():.9f} s: {what}")

    def expect(self, condition: object, what: str) -> None:
        """Record a violation unless a condition holds."""
        if not condition:
            self.violate(what)


def _moved(plan: FaultPlan, origin_ns: int) -> FaultPlan:
    """Return the plan with times counted from the start of the loop."""
    moved = tuple(
        msgspec.structs.replace(fault, at_ns=fault.at_ns + origin_ns) for fault in plan.faults
    )
    return msgspec.structs.replace(plan, faults=moved)
