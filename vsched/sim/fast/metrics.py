"""Simulation metrics, in memory independent of the number of requests.

Durations are counted in sketches: histograms with a bucket width below 0.8 % of the value. Gauges
and rates are sampled at an interval that doubles when there are too many samples, so a minute and a
week take the same memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

import msgspec

from vsched.kernel.commands import Finish
from vsched.notebook import html_table
from vsched.sim.workload.requests import Arrival
from vsched.types import FinishReason

SUB_BITS = 7
"""Each power of two is divided into `2 ** SUB_BITS` buckets."""
SAMPLES_MAX = 1024
SAMPLE_NS = 50_000_000
"""Initial sampling interval."""
CDF_POINTS = 200
TENANTS_MAX = 16
"""Maximum number of tenants with separate figures."""
REASONS_MAX = 16
"""Maximum number of reasons with counters of their own."""
REASON_CHARACTERS = 80
OTHER_REASONS = "other reasons"
MS = 1e-6


class Sketch:
    """Histogram of non-negative integers, accurate to 0.4 %."""

    def __init__(self) -> None:
        self.total = 0
        self.counts = [0] * ((64 - SUB_BITS) << SUB_BITS)

    def add(self, value: int, weight: int = 1) -> None:
        """Count a value `weight` times."""
        shift = value.bit_length() - SUB_BITS - 1
        self.counts[(shift << SUB_BITS) + (value >> shift) if shift > 0 else value] += weight
        self.total += value * weight

    @property
    def count(self) -> int:
        """Number of counted values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Exact mean; 0 if empty."""
        return self.total / max(self.count, 1)

    def quantile(self, share: float) -> float:
        """Return a quantile; 0 if empty."""
        wanted, seen = share * self.count, 0
        for index, count in enumerate(self.counts):
            if count and seen + count >= wanted:
                low, high = _bounds(index)
                return low + (high - low) * max(wanted - seen, 0) / count
            seen += count
        return 0.0

    def cdf_ms(self) -> list[tuple[float, float]]:
        """Return points of the cumulative distribution of nanoseconds as (milliseconds, share), about evenly spaced."""
        found: list[tuple[float, float]] = []
        last, every = 0.0, self.count
        for index, seen in enumerate(accumulate(self.counts)):
            share = seen / max(every, 1)
            if self.counts[index] and (share - last >= 1 / CDF_POINTS or seen == every):
                last = share
                found.append((_bounds(index)[1] * MS, share))
        return found


def _bounds(index: int) -> tuple[int, int]:
    """Return the lower and upper bound of a bucket."""
    shift = max((index >> SUB_BITS) - 1, 0)
    low = (index - (shift << SUB_BITS)) << shift
    return low, low + (1 << shift)


class TimeSpread(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of a duration, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @property
    def line(self) -> str:
        """Its percentiles, to read."""
        return f"{self.p50:,.1f} / {self.p95:,.1f} / {self.p99:,.1f}"


def spread_of(sketch: Sketch) -> TimeSpread:
    """Return the figures of a sketch of nanoseconds."""
    p50, p95, p99 = (sketch.quantile(share) * MS for share in (0.5, 0.95, 0.99))
    return TimeSpread(mean=sketch.mean * MS, p50=p50, p95=p95, p99=p99)


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Maximum latencies that count as goodput; a request's own TTFT target takes precedence."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one tenant's requests; see `SimulationFigures` and `SimulationOutcome`."""

    requests: int
    finished: int
    output_tokens: int
    ttft_ms: TimeSpread
    tpot_ms: TimeSpread
    good_share: float
    failed: dict[str, int] = {}
    ttft_max_ms: float = 0.0
    cdf: dict[str, list[tuple[float, float]]] = {}


class SimulationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one simulation.

    Attributes:
        span_s: From the first arrival to the end of the last request, simulated.
        ttft_ms: From sending a request to its first token, including image preparation.
        itl_ms: Between two tokens of one request, over all tokens.
        tpot_ms: From first to last token, divided by the tokens after the first; one value per
            request.
        queue_ms: From submission to the scheduler to the request's first step.
        goodput: Requests per second that met the targets.
        good_share: Share of all requests that met the targets; refused requests did not.
        prefix_hits: Share of prompt tokens found in the prefix cache.
        embedding_hits: Share of requested embeddings that were cached or being encoded.
        failed: Refused and failed requests, by code.
        reasons: Requests shed by the arrival policy, by reason, cut before its first value, with
            numbers as `#`.
        encode_busy: Busy share of encode groups over the span; likewise `generate_busy`.
        policy_overruled: Valid answers that the kernel did not follow, by the use of the policy and the reason.
        passed_over_s: Longest time for which policies let others pass a request or an image.
        arrivals_s: Times of the first and of the last arrival, in the time of `Series`.
        tenants: Figures by tenant, for the first few tenants of the workload.
    """

    requests: int
    finished: int
    failed: dict[str, int]
    span_s: float
    requests_s: float
    output_tokens_s: float
    prompt_tokens_s: float
    ttft_ms: TimeSpread
    itl_ms: TimeSpread
    tpot_ms: TimeSpread
    e2e_ms: TimeSpread
    queue_ms: TimeSpread
    goodput: float
    good_share: float
    prefix_hits: float
    embedding_hits: float
    images: int
    images_encoded: int
    preemptions: int
    encode_steps: int
    generate_steps: int
    encode_busy: float
    generate_busy: float
    policy_faults: dict[str, int]
    tenants: dict[str, TenantFigures]
    reasons: dict[str, int] = {}
    policy_overruled: dict[str, int] = {}
    passed_over_s: float = 0.0
    arrivals_s: tuple[float, float] = (0.0, 0.0)


class LiveRequest:
    """A request that has not ended.

    Attributes:
        sent_ns: When its client sent it.
        total: Prompt and output tokens at its end.
        target_ns: Its own TTFT target, from sending; None if the simulation's target applies.
        last_token_ns: Time of the last token before it was restarted; 0 if it was not.
    """

    __slots__ = (
        "arrival",
        "last_token_ns",
        "pixels",
        "prompt_tokens",
        "sent_ns",
        "target_ns",
        "total",
    )

    def __init__(
        self, arrival: Arrival, *, sent_ns: int, prompt_tokens: int, pixels: Mapping[str, int]
    ) -> None:
        self.arrival = arrival
        self.sent_ns = sent_ns
        self.prompt_tokens = prompt_tokens
        self.total = prompt_tokens + arrival.output_tokens
        self.pixels = pixels
        self.last_token_ns = 0
        target_ms = arrival.ttft_target_ms
        self.target_ns = None if target_ms is None else target_ms * 1_000_000


class TenantCollector:
    """Accumulates the figures of one tenant, without keeping single requests."""

    def __init__(self) -> None:
        self.ttft, self.tpot = Sketch(), Sketch()
        self.requests = self.finished = self.good = self.output_tokens = self.ttft_max_ns = 0
        self.failed: dict[str, int] = {}

    def count_finished(
        self, ttft_ns: int, tpot_ns: int | None, output_tokens: int, *, good: bool
    ) -> None:
        """Count a finished request; one with a single token has no time per output token."""
        self.finished += 1
        self.good += good
        self.output_tokens += output_tokens
        self.ttft.add(ttft_ns)
        self.ttft_max_ns = max(self.ttft_max_ns, ttft_ns)
        if tpot_ns is not None:
            self.tpot.add(tpot_ns)

    def figures(self) -> TenantFigures:
        """Return the figures."""
        return TenantFigures(
            requests=self.requests,
            finished=self.finished,
            output_tokens=self.output_tokens,
            ttft_ms=spread_of(self.ttft),
            tpot_ms=spread_of(self.tpot),
            good_share=self.good / max(self.requests, 1),
            failed=dict(sorted(self.failed.items())),
            ttft_max_ms=self.ttft_max_ns * MS,
            cdf=self.cdf(),
        )

    def cdf(self) -> dict[str, list[tuple[float, float]]]:
        """Return points (milliseconds, cumulative share) of the distributions, by name."""
        return {"ttft": self.ttft.cdf_ms(), "tpot": self.tpot.cdf_ms()}


class Collector(TenantCollector):
    """Accumulates the figures of all requests, and of each tenant."""

    def __init__(self, targets: Targets, start_ns: int) -> None:
        super().__init__()
        self.itl, self.e2e, self.queue = Sketch(), Sketch(), Sketch()
        self.prompt_tokens = self.cached_tokens = self.images = self.preemptions = 0
        self.reasons: dict[str, int] = {}
        self.tenants: dict[str, TenantCollector] = {}
        self.first_ns: int | None = None
        self.last_ns = self.last_arrival_ns = 0
        self._start_ns = start_ns
        self._ttft_ns = targets.ttft_ms * 1e6
        self._tpot_ns = targets.tpot_ms * 1e6

    def arrived(self, now_ns: int, tenant: str = "") -> None:
        """Count a sent request."""
        if tenant and len(self.tenants) < TENANTS_MAX:
            self.tenants.setdefault(tenant, TenantCollector())
        for one in self._counting(tenant):
            one.requests += 1
        if self.first_ns is None:
            self.first_ns = now_ns
        self.last_arrival_ns = now_ns

    def _counting(self, tenant: str) -> Sequence[TenantCollector]:
        own = self.tenants.get(tenant)
        return (self,) if own is None else (self, own)

    def count_failure(self, code: str, tenant: str, reason: str = "") -> None:
        """Count a refused or failed request, with the reason given by a policy."""
        for one in self._counting(tenant):
            one.failed[code] = one.failed.get(code, 0) + 1
        if reason:
            kind = _reason_kind(reason)
            if kind not in self.reasons and len(self.reasons) >= REASONS_MAX:
                kind = OTHER_REASONS
            self.reasons[kind] = self.reasons.get(kind, 0) + 1

    def count_end(self, live: LiveRequest, finish: Finish, now_ns: int) -> None:
        """Count an ended request."""
        times, outputs = finish.times, live.arrival.output_tokens
        self.last_ns = now_ns
        self.preemptions += times.preemptions
        if finish.reason not in (FinishReason.LENGTH, FinishReason.STOP):
            self.count_failure(finish.code or finish.reason.value, live.arrival.tenant)
            return
        self.prompt_tokens += live.prompt_tokens
        self.cached_tokens += times.cached_tokens
        self.images += len(live.arrival.images)
        self.e2e.add(now_ns - live.sent_ns)
        self.queue.add(times.admitted_ns - times.submitted_ns)
        ttft_ns = times.first_token_ns - live.sent_ns
        tpot_ns = (now_ns - times.first_token_ns) // (outputs - 1) if outputs > 1 else None
        target_ns = self._ttft_ns if live.target_ns is None else live.target_ns
        good = ttft_ns <= target_ns and (tpot_ns or 0) <= self._tpot_ns
        for one in self._counting(live.arrival.tenant):
            one.count_finished(ttft_ns, tpot_ns, outputs, good=good)

    @property
    def arrivals_s(self) -> tuple[float, float]:
        """Times of the first and the last arrival, from the start of the samples."""
        first_ns = self._start_ns if self.first_ns is None else self.first_ns
        last_ns = max(self.last_arrival_ns, first_ns)
        return (first_ns - self._start_ns) / 1e9, (last_ns - self._start_ns) / 1e9


def _reason_kind(reason: str) -> str:
    """Return a reason without its numbers, so that reasons that differ only in numbers are counted together."""
    clause = reason.partition(": value ")[0]
    return re.sub(r"\d[\d,.]*", "#", clause)[:REASON_CHARACTERS]


GAUGES = ("waiting", "running", "items_waiting", "kv_held", "pages_used")
"""Sampled gauges: requests, images, and shares of the KV cache and of the embedding pages."""
SUMS = (
    "steps",
    "decode_tokens",
    "prefill_tokens",
    "encode_steps",
    "encode_items",
    "encode_tokens",
    "encode_busy_ns",
    "generate_busy_ns",
)
"""Counters, as differences between samples."""


class Series(msgspec.Struct, kw_only=True):
    """Gauges and counters over time.

    Sample k is at `(k + 1) * interval_s`; counters hold the increments since the previous sample.
    """

    interval_s: float
    gauges: dict[str, list[float]]
    sums: dict[str, list[int]]

    def __repr__(self) -> str:
        """Return a line without the samples."""
        count = max(map(len, self.gauges.values()), default=0)
        return f"<Series of {count:,} samples every {self.interval_s:g} s: {', '.join((*self.gauges, *self.sums))}>"


class Sampler:
    """Keeps at most `SAMPLES_MAX` samples, by merging neighbours when there are more."""

    def __init__(self, start_ns: int) -> None:
        self.interval_ns = SAMPLE_NS
        self.due_ns = start_ns + SAMPLE_NS
        self._gauges: list[list[float]] = [[] for _ in GAUGES]
        self._sums: list[list[int]] = [[] for _ in SUMS]
        self._before = [0] * len(SUMS)

    def take_samples(self, now_ns: int, gauges: Sequence[float], totals: Sequence[int]) -> None:
        """Take all samples that are due: values have not changed since the previous event."""
        while self.due_ns <= now_ns:
            for column, value in zip(self._gauges, gauges, strict=True):
                column.append(value)
            for sums, total, before in zip(self._sums, totals, self._before, strict=True):
                sums.append(total - before)
            self._before = list(totals)
            if len(self._sums[0]) >= SAMPLES_MAX:
                self._halve()
            self.due_ns += self.interval_ns

    def _halve(self) -> None:
        self.interval_ns *= 2
        self._gauges = [
            [(one + other) / 2 for one, other in zip(column[::2], column[1::2], strict=True)]
            for column in self._gauges
        ]
        self._sums = [
            [one + other for one, other in zip(column[::2], column[1::2], strict=True)]
            for column in self._sums
        ]

    def series(self) -> Series:
        """Return the samples."""
        return Series(
            interval_s=self.interval_ns / 1e9,
            gauges=dict(zip(GAUGES, self._gauges, strict=True)),
            sums=dict(zip(SUMS, self._sums, strict=True)),
        )


class SimulationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a simulation.

    Attributes:
        label: Name in tables and legends.
        policies: The policy of each table, with its fields.
        groups: Number of encode and generate groups.
        scaled_down: Number of images above the size limit.
        events: Number of events handled by the scheduler.
        digest: Digest of all scheduler decisions and their times: equal for equal decisions.
        wall_s: Real time that the simulation took.
        policy_failure_counts: Number of failed policy calls, by seat, over all replicas.
        policy_failures: Traceback of the first failure of each failed policy, by class.
        cdf: Points (milliseconds, cumulative share) of `ttft`, `itl`, `tpot` and `e2e`.
    """

    label: str
    workload: str
    seed: int
    cost: str
    targets: Targets
    policies: dict[str, str]
    groups: tuple[int, int]
    scaled_down: int
    events: int
    digest: str
    wall_s: float
    figures: SimulationFigures
    series: Series
    cdf: dict[str, list[tuple[float, float]]]
    policy_failure_counts: dict[str, int] = {}
    policy_failures: dict[str, str] = {}

    def __repr__(self) -> str:
        """Return a summary in a line."""
        one = self.figures
        return (
            f"<SimulationOutcome {self.label!r} of {self.workload}: {one.finished:,} of {one.requests:,} requests "
            f"finished in {one.span_s:,.1f} s, TTFT p50 {one.ttft_ms.p50:,.1f} ms, p95 {one.ttft_ms.p95:,.1f} ms, "
            f"{one.good_share:.1%} within targets>"
        )

    def _repr_html_(self) -> str:
        one = self.figures
        rows: dict[str, object] = {
            "workload": self.workload,
            "cost model": self.cost,
            "finished": f"{one.finished:,} of {one.requests:,} in {one.span_s:,.1f} s",
            "refused or failed": one.failed,
            "TTFT p50 / p95 / p99, ms": one.ttft_ms.line,
            "TPOT p50 / p95 / p99, ms": one.tpot_ms.line,
            "in queue p50 / p95 / p99, ms": one.queue_ms.line,
            "requests/s within targets": f"{one.goodput:,.2f} ({one.good_share:.1%})",
            "prefix cache hits": f"{one.prefix_hits:.1%}",
            "images encoded": f"{one.images_encoded:,} of {one.images:,}",
            "preemptions": one.preemptions,
            "TTFT p50 / p95 / p99 by tenant, ms": {
                name: tenant.ttft_ms.line for name, tenant in one.tenants.items()
            },
            "policies": self.policies,
        }
        return html_table(f"Simulation {self.label}", rows)

    def plot(self, *others: SimulationOutcome) -> Any:
        """Return the report of this and other outcomes: charts in a notebook; `save(path)` writes the page.

        Raises:
            ConfigError: When Jinja2, of the extra `report`, is not installed.
        """
        # The report draws outcomes, so it is a layer above them.
        rendering = import_module("vsched.sim.report.rendering")
        return rendering.ReportPage((self, *others))


def figures_of(
    collector: Collector,
    totals: Sequence[int],
    *,
    groups: tuple[int, int],
    kernel: Mapping[str, Any],
) -> SimulationFigures:
    """Compute the figures.

    `totals` are the values of `SUMS`, `groups` the numbers of encode and generate groups, and `kernel` its
    statistics.
    """
    hits, misses = kernel["encode"]["cache_hits"], kernel["encode"]["cache_misses"]
    of = dict(zip(SUMS, totals, strict=True))
    span_ns = max(collector.last_ns - (collector.first_ns or 0), 1)
    span_s = span_ns / 1e9
    return SimulationFigures(
        requests=collector.requests,
        finished=collector.finished,
        failed=dict(sorted(collector.failed.items())),
        span_s=span_s,
        requests_s=collector.finished / span_s,
        output_tokens_s=collector.output_tokens / span_s,
        prompt_tokens_s=collector.prompt_tokens / span_s,
        ttft_ms=spread_of(collector.ttft),
        itl_ms=spread_of(collector.itl),
        tpot_ms=spread_of(collector.tpot),
        e2e_ms=spread_of(collector.e2e),
        queue_ms=spread_of(collector.queue),
        goodput=collector.good / span_s,
        good_share=collector.good / max(collector.requests, 1),
        prefix_hits=collector.cached_tokens / max(collector.prompt_tokens, 1),
        embedding_hits=hits / max(hits + misses, 1),
        images=collector.images,
        images_encoded=of["encode_items"],
        preemptions=collector.preemptions,
        encode_steps=of["encode_steps"],
        generate_steps=of["steps"],
        encode_busy=of["encode_busy_ns"] / span_ns / max(groups[0], 1),
        generate_busy=of["generate_busy_ns"] / span_ns / groups[1],
        policy_faults=dict(kernel["policy_faults"]),
        policy_overruled=over_replicas(
            {
                f"{seat}: {reason}": count
                for seat, reasons in kernel["policy_overruled"].items()
                for reason, count in reasons.items()
            }
        ),
        passed_over_s=max(kernel["passed_over_s"].values()),
        arrivals_s=collector.arrivals_s,
        reasons=dict(sorted(collector.reasons.items())),
        tenants={name: one.figures() for name, one in collector.tenants.items()},
    )


def over_replicas(seats: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of counts by seat over all replicas: `generate.step` for `generate-0.step`."""
    counts: dict[str, int] = {}
    for seat, count in seats.items():
        use = re.sub(r"-\d+\.", ".", seat, count=1)
        counts[use] = counts.get(use, 0) + count
    return counts
