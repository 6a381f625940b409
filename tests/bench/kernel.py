"""Cost of one kernel: CPU time of its events by number of replicas, without models.

The scheduler is the real one, and the command plays the ranks. Each host has an encode and a
generate group; each replica runs decoding requests, and always has as many steps in flight as in
production. Other work of the engine (sending, detokenization, HTTP) is not measured.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vsched.config import load_config
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.commands import Decide
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.kernel.events import Arrived, Encoded, Event, Finished, GroupReady, Stepped, Submitted
from vsched.policy_host import SeatPolicies
from vsched.types import (
    ArraySpec,
    Extent,
    FinishReason,
    MediaItem,
    Request,
    SamplingParams,
    group_names,
)

PROMPT_TOKENS = 128
IMAGE_TOKENS = 256
VISIT_TOKENS = PROMPT_TOKENS + IMAGE_TOKENS
VISIT_STEPS = 8
"""More steps than a visit takes on its replica."""
SPARE_SLOTS = 4
STEP_MS = 20.0
"""Time of a step of the ranks."""


class Fleet:
    """A scheduler of many replicas, whose ranks complete steps on request."""

    def __init__(self, replicas: int, running: int, *, policies: SeatPolicies, events: int) -> None:
        """Start `running` decoding requests on each replica, long enough for `events` steps and visits."""
        self.names = group_names("generate", replicas)
        outputs = events * (1 + VISIT_STEPS) // min(replicas, 50) + 64
        tokens = PROMPT_TOKENS + 16 + outputs
        slots = running + SPARE_SLOTS
        limits = SchedulerLimits(
            blocks=slots * (tokens // 16 + 2 + VISIT_TOKENS // 16),
            slots=slots,
            context_tokens=max(32768, tokens),
            pages=4096,
            waiting=replicas * running + 1,
            encoders=replicas,
            generators=replicas,
        )
        self.kernel = Scheduler(limits, policies)
        self.steps: dict[str, deque[GenerateDecision]] = {name: deque() for name in self.names}
        self.encodes: list[tuple[str, EncodeDecision]] = []
        self._tokens = array("i", [7] * slots)
        self._now_ns = 0
        self._visits = replicas * running
        self._rng = random.Random(replicas)
        for name in (*group_names("encode", replicas), *self.names):
            self.tell(GroupReady(name))
        for index in range(replicas * running):
            # Lengths differ, so that requests allocate new blocks in different steps.
            length = PROMPT_TOKENS + index // replicas % 16
            request = one_request(index, self._rng, tokens=length, max_tokens=outputs)
            self.tell(Submitted(request))
        while self.kernel.statistics()["generate"]["decoding"] < replicas * running:
            for name in self.names:
                self.step(name)

    def tell(self, event: Event) -> None:
        """Handle an event, and store the resulting decisions."""
        self._now_ns += 1000
        for command in self.kernel.handle(event, self._now_ns):
            if isinstance(command, Decide):
                decision = command.decision
                if isinstance(decision, EncodeDecision):
                    self.encodes.append((command.group, decision))
                else:
                    self.steps[command.group].append(decision)

    def step(self, name: str, number: int = -1) -> bool:
        """Complete the oldest step of a replica; return True if it ends the visit with this number."""
        decision = self.steps[name].popleft()
        ended = [
            Finished(chunk.slot, number, FinishReason.LENGTH)
            for chunk in decision.chunks
            if number >= 0 and chunk.stop == VISIT_TOKENS
        ]
        self.tell(Stepped(decision.step, self._tokens, ended, group=name))
        return bool(ended)

    def visit(self) -> tuple[int, int]:
        """Run a one-image request to its first token; return the ns of its arrival, and of all its events."""
        number = self._visits = self._visits + 1
        request = one_request(number, self._rng, tokens=VISIT_TOKENS, max_tokens=1, has_image=True)
        arrived = Arrived(number, images=1, outputs_max=1)
        began_ns = time.thread_time_ns()
        self.tell(arrived)
        self.tell(Submitted(request, arrival_id=number))
        arrival_ns = time.thread_time_ns() - began_ns
        while self.encodes:
            name, decision = self.encodes.pop()
            self.tell(Encoded(decision.step, name))
        encoded_ns = time.thread_time_ns() - began_ns
        (group,) = (group for group in self.kernel.generators if group.queue.entries)
        began_ns = time.thread_time_ns()
        while not self.step(group.name, number):
            pass
        return arrival_ns, encoded_ns + time.thread_time_ns() - began_ns


@dataclass(frozen=True)
class Row:
    """Results for one number of replicas: µs per event, one figure for each repeat."""

    replicas: int
    step_us: list[float]
    arrival_us: list[float]
    visit_us: list[float]

    def line(self) -> str:
        step, visit = statistics.median(self.step_us), statistics.median(self.visit_us)
        share = self.replicas * step / (STEP_MS * 1e3)
        left = max(1 - share, 0.0) * 1e6 / visit
        cells = (f"{1e6 / step:,.0f}", f"{share:.1%}", f"{left:,.0f}" if left else "none")
        costs = map(_text, (self.step_us, self.arrival_us, self.visit_us))
        return f"| {self.replicas:,} | {' | '.join((*costs, *cells))} |"


def _text(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.1f} ({min(values):,.1f}-{max(values):,.1f})"


HEAD = (
    "| replicas | decode step, µs | arrival, µs | one-image request, µs | steps/s of a core "
    f"| core that steps of {STEP_MS:g} ms take | one-image requests/s beside them |"
    "\n|---:|---:|---:|---:|---:|---:|---:|"
)


def one_request(
    index: int, rng: random.Random, *, tokens: int, max_tokens: int, has_image: bool = False
) -> Request:
    """Return a request of `tokens` tokens, with an image in the middle or without; nothing of it is cached."""
    prompt = [rng.randrange(10, 4000) for _ in range(tokens)]
    offset = (tokens - IMAGE_TOKENS) // 2
    item = MediaItem(
        key=index.to_bytes(32, "little"),
        tokens=IMAGE_TOKENS,
        offset=offset,
        arrays=(ArraySpec("pixel_values", "float32", (4 * IMAGE_TOKENS, 1176)),),
        metadata=bytes(24),
        extent=Extent(0, 1024),
    )
    if has_image:
        prompt[offset : offset + IMAGE_TOKENS] = [5] * IMAGE_TOKENS
    return Request(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        items=(item,) if has_image else (),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def measure(
    replicas: int, running: int, *, policies: SeatPolicies, events: int, repeats: int
) -> Row:
    """Measure `events` steps and visits in each repeat, the steps of all replicas in turn."""
    fleet = Fleet(replicas, running, policies=policies, events=events * repeats)
    row = Row(replicas, [], [], [])
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            first = repeat * events
            names = [fleet.names[turn % replicas] for turn in range(first, first + events)]
            began_ns = time.thread_time_ns()
            for name in names:
                fleet.step(name)
            row.step_us.append((time.thread_time_ns() - began_ns) / events / 1e3)
            visits = zip(*(fleet.visit() for _ in range(events)), strict=True)
            for found, times_ns in zip((row.arrival_us, row.visit_us), visits, strict=True):
                found.append(statistics.median(times_ns) / 1e3)
    finally:
        gc.enable()
    return row


def most_replicas(rows: Sequence[Row]) -> int:
    """Return the number of replicas that fill a core with decode steps of `STEP_MS`.

    A step costs a + b x replicas, a line through the rows with the fewest and the most replicas: so
    N replicas take N (a + b N) of a core in a step's time.
    """
    few, many = ((row.replicas, statistics.median(row.step_us)) for row in (rows[0], rows[-1]))
    each = max((many[1] - few[1]) / max(many[0] - few[0], 1), 1e-6)
    base = max(few[1] - each * few[0], 0.0)
    return int((math.sqrt(base * base + 4 * each * STEP_MS * 1e3) - base) / (2 * each))


def main(print_line: Callable[[str], None] = print) -> None:
    """Print a table with a line for each number of replicas, and the resulting limit of one kernel."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kernel")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--running", type=int, default=4, help="requests that decode on each")
    parser.add_argument("--events", type=int, default=50, help="steps and requests a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    policies = load_config(None, environ={}).policies.for_kernel()
    print_line(HEAD)
    rows = []
    for replicas in sorted(options.replicas):
        sizes = {"events": options.events, "repeats": options.repeats}
        rows.append(measure(replicas, options.running, policies=policies, **sizes))
        print_line(rows[-1].line())
    print_line(
        f"\nOne core drives {most_replicas(rows):,} replicas at {STEP_MS:g} ms a step; k kernels k times as many."
    )


if __name__ == "__main__":
    main()
