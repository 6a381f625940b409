"""Scenarios under pressure: resources are scarce and busy when faults and operator actions occur.

Preemptions and group losses are rare, so a plain scenario hardly ever has both at once. Here KV
cache, embeddings and slots are as small as possible, all requests arrive together, and faults are
drawn in patterns known to interact: repeated losses, failed starts, and disconnects and operator
actions in between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from vsched.config import Config
from vsched.sim.cluster.operators import Action, Operation
from vsched.sim.faults.plan import AnyFault, Disconnect, FaultPlan, OutOfMemory, WorkerCrash
from vsched.sim.workload.requests import Arrival
from vsched.types import stage_of

SPAN_NS = 1_500_000_000
MILLISECOND_NS = 1_000_000
BACK_MS = 205
"""Approximate time from a group loss to KV cache sizing; see `vsched.sim.world.Delays`."""
STARTS = 4
"""Number of consecutive failed starts after which a group is retired."""


def press_config(rng: random.Random, config: Config) -> Config:
    """Return a configuration with minimal resources."""
    generate = msgspec.structs.replace(
        config.generate,
        slots=rng.choice([3, 6, 8]),
        chunk_tokens=rng.choice([8, 24]),
        memory={"use": "pinned", "tokens": rng.choice([256, 264, 288])},
    )
    encode = msgspec.structs.replace(
        config.encode,
        admission=rng.choice(
            [
                {"use": "token-budget", "max_items": 8},
                {"use": "priority"},
                {"use": "fifo"},
            ]
        ),
    )
    arena = msgspec.structs.replace(
        config.arena, pixel_bytes=65536, embedding_bytes=1024 * rng.choice([2, 3, 6])
    )
    return msgspec.structs.replace(config, generate=generate, encode=encode, arena=arena)


def press_arrivals(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Return requests with long outputs that arrive almost together."""
    gap_ns = rng.choice([0, 5, 50]) * MILLISECOND_NS
    return tuple(
        msgspec.structs.replace(arrival, at_ns=index * gap_ns, output_tokens=rng.randint(1, 64))
        for index, arrival in enumerate(arrivals)
    )


def draw_patterns(
    rng: random.Random, groups: Sequence[str]
) -> tuple[FaultPlan, tuple[Operation, ...]]:
    """Draw faults and operator actions."""
    drawn = _Patterns(rng)
    generators = [name for name in groups if stage_of(name) == "generate"]
    for _ in range(rng.randint(1, 4)):
        at_ns = rng.randrange(SPAN_NS // MILLISECOND_NS) * MILLISECOND_NS
        pattern = rng.choice(PATTERNS)
        pattern(drawn, at_ns, rng.choice([*groups, *generators]))
    faults = sorted(drawn.faults, key=lambda fault: fault.at_ns)
    plan = FaultPlan(seed=rng.getrandbits(32), faults=tuple(faults))
    return plan, tuple(sorted(drawn.operations, key=lambda operation: operation.at_ns))


class _Patterns:
    """Faults and operator actions drawn so far; each method adds a pattern of them for a group."""

    def __init__(self, rng: random.Random) -> None:
        self.faults: list[AnyFault] = []
        self.operations: list[Operation] = []
        self._rng = rng

    def losses(self, at_ns: int, group: str) -> None:
        """Lose a group several times; clients disconnect in between."""
        rng = self._rng
        for _ in range(rng.randint(1, 3)):
            moment = rng.choice(("before_reply", "after_reply"))
            self.faults.append(WorkerCrash(at_ns=at_ns, group=group, moment=moment))  # type: ignore[arg-type]
            at_ns += rng.randint(BACK_MS, 3 * BACK_MS) * MILLISECOND_NS
            if rng.random() < 0.5:
                phase = rng.choice(("wait", "prefill", "decode"))
                self.faults.append(Disconnect(at_ns=at_ns, phase=phase))  # type: ignore[arg-type]

    def no_return(self, at_ns: int, group: str) -> None:
        """Lose a group that fails to restart."""
        self.faults.append(WorkerCrash(at_ns=at_ns, group=group))
        self.faults += [OutOfMemory(at_ns=at_ns, group=group, during="load")] * STARTS

    def failed_batches(self, at_ns: int, group: str) -> None:
        """Make steps run out of memory, mostly encoder steps."""
        group = group.replace("generate", "encode") if self._rng.random() < 0.7 else group
        self.faults += [
            OutOfMemory(at_ns=at_ns + 5 * index * MILLISECOND_NS, group=group)
            for index in range(self._rng.randint(1, 3))
        ]

    def cleared(self, at_ns: int, group: str) -> None:
        """Lose a group, and clear all requests at about the time it returns."""
        self.faults.append(WorkerCrash(at_ns=at_ns, group=group))
        later_ms = self._rng.randint(BACK_MS - 5, BACK_MS + 40)
        self._operate(at_ns + later_ms * MILLISECOND_NS, "clear")

    def left(self, at_ns: int, _: str) -> None:
        """Disconnect clients one after another, or clear all requests, under full load."""
        if self._rng.random() < 0.5:
            self._operate(at_ns, "clear")
        else:
            self.faults.append(Disconnect(at_ns=at_ns, phase="decode"))
            self.faults.append(Disconnect(at_ns=at_ns, phase="wait"))

    def administered(self, at_ns: int, group: str) -> None:
        """Drain a group, then lose, resume or restart it before it is drained."""
        self._operate(at_ns, "drain", group)
        at_ns += self._rng.randint(5, 300) * MILLISECOND_NS
        if self._rng.random() < 0.4:
            self.faults.append(WorkerCrash(at_ns=at_ns, group=group))
        self._operate(at_ns, self._rng.choice(("resume", "restart")), group)

    def _operate(self, at_ns: int, action: Action, group: str = "") -> None:
        self.operations.append(Operation(at_ns=at_ns, action=action, group=group))


PATTERNS = (
    _Patterns.losses,
    _Patterns.losses,
    _Patterns.no_return,
    _Patterns.failed_batches,
    _Patterns.cleared,
    _Patterns.left,
    _Patterns.administered,
    _Patterns.administered,
)
