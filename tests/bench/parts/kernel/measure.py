"""Kernel cost: microseconds per steady decode step, per one-image request, and per arrival of a large request.

No model runs: the benchmark plays the ranks. In a steady step all running requests decode and none
arrives or ends; requests do allocate new blocks, spread evenly over the steps, as in production.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec

from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.commands import Command, Decide
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.kernel.events import Encoded, Finished, GroupReady, Stepped, Submitted
from vsched.policy_host import SeatPolicies
from vsched.types import ArraySpec, Extent, FinishReason, MediaItem, Request, SamplingParams

PROMPT_TOKENS = 128
IMAGE_TOKENS = 256
RUNNING = (1, 64, 256, 1024, 4096)
PREFILL_TOKENS = 8192
LARGE_IMAGES = 8
LARGE_TOKENS = 2300


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured case, microseconds; `spread_us` is the standard deviation of the repeats' medians."""

    case: str
    running: int
    events: int
    p50_us: float
    p99_us: float
    mean_us: float
    spread_us: float


class _Drive:
    """A scheduler whose decisions complete at once, timed event by event."""

    def __init__(self, limits: SchedulerLimits, policies: SeatPolicies) -> None:
        self.kernel = Scheduler(limits, policies)
        self.encodes: list[EncodeDecision] = []
        self.steps: list[GenerateDecision] = []
        self.now_ns = 0
        self.tokens = array("i", [7] * limits.slots)
        for group in ("encode", "generate"):
            self.take(self.kernel.handle(GroupReady(group), 0))

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Decide):
                decision = command.decision
                if isinstance(decision, EncodeDecision):
                    self.encodes.append(decision)
                else:
                    self.steps.append(decision)

    def submit(self, request: Request) -> int:
        """Submit a request; return the time in nanoseconds."""
        event = Submitted(request)
        self.now_ns += 1000
        start_ns = time.perf_counter_ns()
        commands = self.kernel.handle(event, self.now_ns)
        spent_ns = time.perf_counter_ns() - start_ns
        self.take(commands)
        return spent_ns

    def encode(self) -> int:
        """Complete the pending encode step; return the time in nanoseconds."""
        event = Encoded(self.encodes.pop(0).step)
        start_ns = time.perf_counter_ns()
        commands = self.kernel.handle(event, self.now_ns)
        spent_ns = time.perf_counter_ns() - start_ns
        self.take(commands)
        return spent_ns

    def step(self, finished: Sequence[Finished] = ()) -> int:
        """Complete the oldest generate step; return the time in nanoseconds."""
        event = Stepped(self.steps.pop(0).step, self.tokens, list(finished))
        self.now_ns += 1000
        start_ns = time.perf_counter_ns()
        commands = self.kernel.handle(event, self.now_ns)
        spent_ns = time.perf_counter_ns() - start_ns
        self.take(commands)
        return spent_ns


def _limits(slots: int, tokens_each: int) -> SchedulerLimits:
    return SchedulerLimits(
        blocks=(slots + 64) * (tokens_each // 16 + 2),
        slots=slots,
        batch_tokens=slots + PREFILL_TOKENS,
        chunk_tokens=PREFILL_TOKENS,
        context_tokens=max(32768, tokens_each),
        pages=4096,
        waiting=slots + 64,
    )


def one_request(
    index: int, rng: random.Random, *, images: int, tokens: int, max_tokens: int
) -> Request:
    """Return a request of `tokens` tokens with evenly spaced images; nothing of it is cached."""
    prompt = [rng.randrange(10, 4000) for _ in range(tokens)]
    gap = (tokens - images * IMAGE_TOKENS) // (images + 1)
    items = []
    for number in range(images):
        offset = gap + number * (gap + IMAGE_TOKENS)
        prompt[offset : offset + IMAGE_TOKENS] = [5] * IMAGE_TOKENS
        key = (index * LARGE_IMAGES + number).to_bytes(32, "little")
        extent = Extent(0, 1024)
        items.append(
            MediaItem(
                key=key,
                tokens=IMAGE_TOKENS,
                offset=offset,
                arrays=(ArraySpec("pixel_values", "float32", (4 * IMAGE_TOKENS, 1176)),),
                metadata=bytes(24),
                extent=extent,
            )
        )
    return Request(
        request_id=f"r{index}",
        prompt_token_ids=prompt,
        items=tuple(items),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def measure_decode(policies: SeatPolicies, running: int, *, steps: int, repeats: int) -> KernelRow:
    """Measure steady decode steps with `running` requests."""
    rng = random.Random(running)
    prompts = running * (PROMPT_TOKENS + 16)
    outputs = steps * repeats + prompts // PREFILL_TOKENS + 32  # some decode while others prefill
    drive = _Drive(_limits(running, PROMPT_TOKENS + 16 + outputs), policies)
    for index in range(running):
        # Lengths differ, so that requests allocate new blocks in different steps.
        length = PROMPT_TOKENS + index % 16
        drive.submit(one_request(index, rng, images=0, tokens=length, max_tokens=outputs))
    while drive.kernel.statistics()["generate"]["decoding"] < running:
        drive.step()
    drive.step()
    return _row("decode step", running, drive.step, steps=steps, repeats=repeats)


def measure_request(policies: SeatPolicies, *, requests: int, repeats: int) -> KernelRow:
    """Measure all kernel work for a one-image request from arrival to end.

    The request yields one token; `measure_decode` measures further ones.
    """
    measure = _visits(policies, requests * repeats, images=1, tokens=PROMPT_TOKENS + IMAGE_TOKENS)
    return _row("one-image request", 0, lambda: sum(next(measure)), steps=requests, repeats=repeats)


def measure_arrival(policies: SeatPolicies, *, requests: int, repeats: int) -> KernelRow:
    """Measure the arrival alone, including hashing, of a request with many images.

    There are no other requests, so an encoder batch and a step with the first text are decided in
    the same event; blocks and pages come from cache evictions. It ends before the next one arrives.
    """
    measure = _visits(policies, requests * repeats, images=LARGE_IMAGES, tokens=LARGE_TOKENS)
    case = f"arrival of {LARGE_IMAGES} images, {LARGE_TOKENS:,} tokens"
    return _row(case, 0, lambda: next(measure)[0], steps=requests, repeats=repeats)


def _visits(
    policies: SeatPolicies, total: int, *, images: int, tokens: int
) -> Iterator[tuple[int, int]]:
    """Run requests one after another; yield the time of each arrival, and of the rest of its processing."""
    rng = random.Random(0)
    drive = _Drive(_limits(8, 4096), policies)
    for number in range(1, total + 1):
        request = one_request(number, rng, images=images, tokens=tokens, max_tokens=1)
        arriving_ns, rest_ns = drive.submit(request), 0
        finished: list[Finished] = []
        while drive.encodes or drive.steps:
            rest_ns += drive.encode() if drive.encodes else drive.step(finished)
            finished = [
                Finished(chunk.slot, number, FinishReason.LENGTH)
                for decision in drive.steps
                for chunk in decision.chunks
                if chunk.stop == tokens
            ]
        yield arriving_ns, rest_ns


def _row(
    case: str, running: int, measure: Callable[[], int], *, steps: int, repeats: int
) -> KernelRow:
    gc.collect()
    gc.disable()
    try:
        rounds = [[measure() / 1e3 for _ in range(steps)] for _ in range(repeats)]
    finally:
        gc.enable()
    flat = sorted(value for one in rounds for value in one)
    medians = [statistics.median(one) for one in rounds]
    return KernelRow(
        case=case,
        running=running,
        events=len(flat),
        p50_us=round(statistics.median(flat), 2),
        p99_us=round(flat[int(len(flat) * 0.99)], 2),
        mean_us=round(statistics.fmean(flat), 2),
        spread_us=round(statistics.stdev(medians), 2) if repeats > 1 else 0.0,
    )
