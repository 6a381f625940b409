"""Prometheus metrics of requests and of the engine, whose counters are read when scraped.

Names are vLLM's if it has the same metric, with `vsched_` in place of `vllm:`; Prometheus reserves colons for recording
rules. `exposed` adds the aliases of vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from vsched.aio.timelines import Histogram as PlainHistogram
from vsched.api.contract import EngineContract
from vsched.api.response_schema import Usage

Statistics = Mapping[str, Any]
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily

_TOTALS = (
    (GAUGE, "num_requests_waiting", "waiting", "Accepted requests without a slot."),
    (GAUGE, "live_bytes", "live_bytes", "Memory held by accepted requests."),
    (GAUGE, "uptime_seconds", "uptime_s", "Time since the engine was created."),
    (GAUGE, "encode_items_waiting", "encode.waiting_items", "Images that wait for an encoder."),
    (COUNTER, "encode_items", "encode.items_encoded", "Images encoded."),
    (COUNTER, "encode_items_copied", "encode.items_copied", "Embeddings from clients."),
    (COUNTER, "encode_tokens", "encode.tokens_encoded", "Encoder output tokens."),
    (COUNTER, "encoder_cache_hits", "encode.cache_hits", "Embedding cache hits."),
    (COUNTER, "encoder_cache_misses", "encode.cache_misses", "Embedding cache misses."),
    (COUNTER, "encoder_cache_evictions", "encode.cache_evictions", "Embeddings evicted."),
    (
        COUNTER,
        "encoder_cache_preemptions",
        "encode.cache_preemptions",
        "Embeddings evicted for older requests.",
    ),
    (GAUGE, "encoder_cache_entries", "encode.cache_entries", "Embeddings in the cache."),
    (GAUGE, "encoder_cache_pages", "encode.pages_total", "Arena pages for embeddings."),
    (GAUGE, "encoder_cache_pages_free", "encode.pages_free", "Free arena pages."),
    (
        GAUGE,
        "encoder_cache_pages_evictable",
        "encode.pages_evictable",
        "Arena pages of embeddings that no request needs.",
    ),
    (GAUGE, "media_preparing", "media.preparing", "Requests in preparation."),
    (GAUGE, "media_preparing_bytes", "media.preparing_bytes", "Encoded bytes held."),
    (COUNTER, "media_processed", "media.processed", "Images decoded and processed."),
    (COUNTER, "media_embedded", "media.embedded", "Images received as embeddings."),
    (COUNTER, "media_repeated", "media.repeated", "Images found in the cache."),
    (COUNTER, "media_refused", "media.refused", "Requests refused for their images."),
    (GAUGE, "decode_budget_bytes", "media.decode.bytes_total", "Memory for decoding images."),
    (GAUGE, "decode_budget_used_bytes", "media.decode.bytes_used", "Decoding memory in use."),
    (GAUGE, "pixel_bytes", "media.pixels.bytes_total", "Size of the pixel region."),
    (GAUGE, "pixel_held_bytes", "media.pixels.bytes_held", "Pixels held by requests."),
    (GAUGE, "pixel_kept_bytes", "media.pixels.bytes_kept", "Cached pixels."),
    (COUNTER, "pixel_cache_hits", "media.pixels.hits", "Pixel cache hits."),
    (COUNTER, "pixel_cache_misses", "media.pixels.misses", "Pixel cache misses."),
    (COUNTER, "pixel_cache_evictions", "media.pixels.evictions", "Pixels evicted."),
)
"""Type, name, path in the statistics, and description."""

_BY_REASON = (
    ("requests_finished", "finished_reason", "finished", "Accepted requests that ended."),
    ("requests_refused", "reason", "refused", "Requests that the scheduler refused."),
    ("policy_faults", "policy", "policy_faults", "Policy failures; the default decided."),
)
"""Counters with one label; its values are the keys of a dictionary in the statistics."""

_GENERATE = (
    (GAUGE, "load_tokens", "load_tokens", "Tokens still to be computed."),
    (GAUGE, "requests_queued", "waiting", "Requests in the waiting queue."),
    (GAUGE, "requests_prefilling", "prefilling", "Requests in prefill."),
    (GAUGE, "requests_decoding", "decoding", "Requests that decode."),
    (GAUGE, "steps_in_flight", "steps_in_flight", "Steps in flight."),
    (GAUGE, "slots", "slots_total", "Maximum number of running requests."),
    (GAUGE, "kv_blocks", "blocks_total", "KV blocks."),
    (GAUGE, "kv_blocks_held", "blocks_held", "KV blocks held by requests."),
    (GAUGE, "kv_blocks_cached", "blocks_cached", "KV blocks held only by the prefix cache."),
    (COUNTER, "num_preemptions", "preemptions", "Preempted requests."),
    (GAUGE, "num_requests_swapped", "swapped", "Requests swapped to host memory."),
    (GAUGE, "swap_blocks", "swap_blocks_total", "Swap space in host memory, in KV blocks."),
    (GAUGE, "swap_blocks_held", "swap_blocks_held", "Swapped-out KV blocks."),
    (COUNTER, "swap_blocks_out", "swap_blocks_out", "Blocks copied to host memory."),
    (COUNTER, "swap_blocks_in", "swap_blocks_in", "Blocks copied back."),
    (COUNTER, "requests_admitted", "admitted", "Requests admitted to a slot."),
    (COUNTER, "tokens_prefilled", "tokens_prefilled", "Prompt tokens computed."),
    (COUNTER, "tokens_decoded", "tokens_decoded", "Tokens decoded."),
    (COUNTER, "tokens_drafted", "tokens_drafted", "Draft tokens proposed."),
    (COUNTER, "drafts_accepted", "drafts_accepted", "Draft tokens accepted."),
    (COUNTER, "prefix_cache_queries", "tokens_looked_up", "Prefix cache lookups, in tokens."),
    (COUNTER, "prefix_cache_hits", "tokens_cached", "Prefix cache hits, in tokens."),
    (COUNTER, "prefix_cache_evictions", "prefix_evictions", "Prefix cache blocks evicted."),
)
"""Type, name, key in a generate group's statistics, and description."""


_HISTOGRAMS = {
    "request_preprocess_time_seconds": "Time from arrival until prompt and images are prepared.",
    "request_encode_time_seconds": "Time until the images of the first chunk are encoded, with waiting.",
    "request_queue_time_seconds": "Time in the waiting queue.",
    "request_prefill_time_seconds": "Time from a slot to the first token.",
    "request_decode_time_seconds": "Time from the first token to the end.",
    "request_prompt_tokens": "Prompt tokens of a choice.",
    "request_generation_tokens": "Output tokens of a choice.",
}
"""Histograms of choices that ended with `stop` or `length`, and their descriptions."""

_VLLM_NAMES = {
    "time_to_first_token_seconds": (),
    "inter_token_latency_seconds": ("time_per_output_token_seconds",),
    "e2e_request_latency_seconds": (),
    "request_queue_time_seconds": (),
    "request_prefill_time_seconds": (),
    "request_decode_time_seconds": (),
    "request_prompt_tokens": (),
    "request_generation_tokens": ("request_max_num_generation_tokens",),
    "prompt_tokens": (),
    "generation_tokens": (),
    "num_requests_running": (),
    "num_requests_waiting": (),
    "num_requests_swapped": (),
    "num_preemptions": (),
    "kv_cache_usage_perc": ("gpu_cache_usage_perc",),
    "prefix_cache_queries": ("gpu_prefix_cache_queries",),
    "prefix_cache_hits": ("gpu_prefix_cache_hits",),
    "requests_finished": ("request_success",),
}
"""Metrics of vLLM under the same names, and their further names, such as those of earlier versions."""

_KV_USAGE = "Fraction of KV blocks held by requests."
ARRIVAL_OUTCOMES = ("admitted", "held", "shed", "redirected")
_ARRIVALS = "Decisions of the arrival policy."
_UNCLAIMED = "Rest of a memory pool at the peaks of all processes; negative if too much is claimed."
_OVERRULED = "Valid policy answers that the kernel did not follow."
_PASSED_OVER = "Longest time for which policies let others pass a request or an image."
_SLOW = "Policy calls over policies.call_budget_ms."
_REPLACED = "1 if the default has replaced the policy."
_THREADS = "Compute threads in use: fewer while other programs keep the cores busy."
_KERNELS_LATE = "Kernels compiled or read from disk while the rank served."


class EngineCollector(Collector):
    """Reads the statistics and groups of an engine; values that do not exist yet are left out."""

    def __init__(
        self,
        statistics: Callable[[], dict[str, Any]],
        groups: Callable[[], list[dict[str, Any]]],
        adapters: Callable[[], list[dict[str, Any]]],
    ) -> None:
        self._statistics, self._groups, self._adapters = statistics, groups, adapters

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: otherwise registration would read the statistics before the engine runs."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every family that has a value."""
        statistics = self._statistics()
        for kind, name, path, what in _TOTALS:
            value = _at(statistics, path)
            if value is not None:
                yield kind(f"vsched_{name}", what, value=value)
        for name, label, path, what in _BY_REASON:
            yield _family(COUNTER, name, what, label, statistics.get(path, {}).items())
        decided = statistics.get("arrival", {})
        outcomes = [(name, decided[name]) for name in ARRIVAL_OUTCOMES if name in decided]
        yield _family(COUNTER, "arrivals", _ARRIVALS, "outcome", outcomes)
        yield from _histograms(statistics.get("histograms", {}))
        yield from _memory(statistics)
        yield from _policy_calls(statistics)
        yield from _generate_groups(_at(statistics, "generate.groups") or {})
        yield from _ranks(statistics)
        yield from _all_groups(self._groups())
        yield from _all_adapters(self._adapters())


def exposed(
    families: Iterable[Metric], *, model_name: str, vllm_names: bool = False
) -> Iterator[Metric]:
    """Yield families with the label `model_name`, and with vLLM's aliases if wanted."""
    label = {"model_name": model_name} if model_name else {}
    for family in families:
        names = [family.name]
        own = family.name.removeprefix("vsched_")
        if vllm_names and own in _VLLM_NAMES:
            names += [f"vllm:{name}" for name in (own, *_VLLM_NAMES[own])]
        for name in names:
            metric = Metric(name, family.documentation, family.type)
            metric.samples = [
                sample._replace(
                    name=name + sample.name.removeprefix(family.name),
                    labels={**label, **sample.labels},
                )
                for sample in family.samples
            ]
            yield metric


def _at(statistics: Statistics, path: str) -> Any:
    found: Any = statistics
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    what: str,
    labels: str,
    rows: Iterable[tuple[Any, ...]],
) -> Metric:
    """Build a family; each row has the values of its labels, and the value."""
    family = kind(f"vsched_{name}", what, labels=labels.split())
    for *names, value in rows:
        family.add_metric([str(each) for each in names], value)
    return family


def cumulative(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return the buckets of a histogram in Prometheus' form: a bound, and the count up to it."""
    labels = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
    return list(zip([*labels, "+Inf"], accumulate(counts), strict=True))


def _histograms(histograms: Mapping[str, Statistics]) -> Iterator[Metric]:
    for name, each in histograms.items():
        buckets = cumulative(each["bounds"], each["counts"])
        yield HistogramMetricFamily(
            f"vsched_{name}", _HISTOGRAMS[name], buckets=buckets, sum_value=each["sum"]
        )


def _memory(statistics: Statistics) -> Iterator[Metric]:
    """Yield the sizes of memory pools, with their unclaimed rest, and the memory of processes."""
    pools = _at(statistics, "ledger.pools") or ()
    total = [(pool["pool"], pool["total"]) for pool in pools]
    yield _family(GAUGE, "memory_pool_bytes", "Size of a memory pool.", "pool", total)
    unclaimed = [
        (pool["pool"], line["bytes"])
        for pool in pools
        for line in pool["lines"]
        if line["line"] == "unclaimed"
    ]
    yield _family(GAUGE, "memory_unclaimed_bytes", _UNCLAIMED, "pool", unclaimed)
    processes = [
        (name.removesuffix("_resident"), size)
        for name, size in statistics.get("memory", {}).items()
        if name.endswith("_resident")
    ]
    yield _family(
        GAUGE, "resident_memory_bytes", "Resident memory of a process.", "process", processes
    )


def _generate_groups(groups: Mapping[str, Statistics]) -> Iterator[Metric]:
    groups = {
        name: {**each, "tokens_looked_up": each["tokens_prefilled"] + each["tokens_cached"]}
        for name, each in groups.items()
    }
    running = [(name, each["prefilling"] + each["decoding"]) for name, each in groups.items()]
    yield _family(GAUGE, "num_requests_running", "Requests with a slot.", "group", running)
    used = [
        (name, each["blocks_held"] / max(each["blocks_total"], 1)) for name, each in groups.items()
    ]
    yield _family(GAUGE, "kv_cache_usage_perc", _KV_USAGE, "group", used)
    for kind, metric, key, what in _GENERATE:
        yield _family(
            kind, metric, what, "group", [(name, each[key]) for name, each in groups.items()]
        )


def _policy_calls(statistics: Statistics) -> Iterator[Metric]:
    overruled = [
        (seat, reason, count)
        for seat, reasons in statistics.get("policy_overruled", {}).items()
        for reason, count in reasons.items()
    ]
    yield _family(COUNTER, "policy_overruled", _OVERRULED, "seat reason", overruled)
    passed = statistics.get("passed_over_s", {}).items()
    yield _family(GAUGE, "passed_over_seconds_max", _PASSED_OVER, "group", passed)
    calls = statistics.get("policy_calls", {})
    seconds = SummaryMetricFamily(
        "vsched_policy_call_seconds", "Policy calls and their duration.", labels=("seat",)
    )
    for seat, each in calls.items():
        seconds.add_metric((seat,), count_value=each["calls"], sum_value=each["seconds"])
    yield seconds
    slow = [(seat, each["slow"]) for seat, each in calls.items()]
    yield _family(COUNTER, "policy_slow_calls", _SLOW, "seat", slow)
    replaced = [(seat, seat in statistics.get("policy_replaced", {})) for seat in calls]
    yield _family(GAUGE, "policy_replaced", _REPLACED, "seat", replaced)


def _ranks(statistics: Statistics) -> Iterator[Metric]:
    memory = [
        (group, rank, kind, size)
        for group, members in statistics.get("ranks", {}).items()
        for rank, kinds in members.items()
        for kind, size in kinds.items()
    ]
    what = "Memory of a rank, by kind."
    yield _family(GAUGE, "rank_memory_bytes", what, "group rank kind", memory)
    threads = [
        (group, rank, each)
        for group, members in statistics.get("threads", {}).items()
        for rank, each in members.items()
    ]
    active = [(group, rank, each["active"]) for group, rank, each in threads]
    yield _family(GAUGE, "rank_threads", _THREADS, "group rank", active)
    total = [(group, rank, each["total"]) for group, rank, each in threads]
    yield _family(GAUGE, "rank_threads_max", "Compute threads of a rank.", "group rank", total)


def _all_groups(groups: list[dict[str, Any]]) -> Iterator[Metric]:
    up = [(each["name"], each["state"] == "up") for each in groups]
    yield _family(GAUGE, "group_up", "1 if the group is up.", "group", up)
    restarts = [(each["name"], each.get("restarts", 0)) for each in groups]
    yield _family(COUNTER, "group_restarts", "Restarts of a group.", "group", restarts)
    losses = [
        (each["name"], reason, count)
        for each in groups
        for reason, count in each.get("losses", {}).items()
    ]
    what = "Losses of a group, by reason."
    yield _family(COUNTER, "group_losses", what, "group reason", losses)
    busy = [(each["name"], each.get("busy_ms", 0) / 1000) for each in groups]
    yield _family(COUNTER, "group_busy_seconds", "Compute time of a group's ranks.", "group", busy)
    late = [
        (each["name"], rank["rank"], rank["kernels_late"])
        for each in groups
        for rank in each.get("ranks", ())
    ]
    yield _family(GAUGE, "rank_kernels_late", _KERNELS_LATE, "group rank", late)


def _all_adapters(adapters: list[dict[str, Any]]) -> Iterator[Metric]:
    running = [(each["name"], each.get("running", 0)) for each in adapters]
    what = "Running requests with this adapter."
    yield _family(GAUGE, "adapter_requests_running", what, "adapter", running)
    requests = [(each["name"], each.get("requests", 0)) for each in adapters]
    what = "Requests with this adapter since it was loaded."
    yield _family(COUNTER, "adapter_requests", what, "adapter", requests)


logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OTHER_TENANTS = "other tenants"
"""Label for all tenants above the limit; not a valid tenant name."""
_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _Times(Collector):
    """A histogram for per-token events: without locks, because it is used only in the event loop's thread."""

    def __init__(self, name: str, what: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._what = what
        self._histogram = PlainHistogram(bounds)
        self.observe = self._histogram.observe

    def collect(self) -> Iterator[Metric]:
        found = self._histogram
        buckets = cumulative(found.bounds, found.counts)
        yield HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=found.sum)


class ApiMetrics(Collector):
    """Metrics of one application, in its own registry.

    Metrics of other processes are added to its own.

    Attributes:
        in_flight: Number of requests in progress.
        reports: Returns the metrics of other processes.
    """

    def __init__(
        self,
        engine: EngineContract | None = None,
        *,
        tenants_max: int = 64,
        vllm_names: bool = False,
    ) -> None:
        """Create the metrics; without an engine, there are no engine metrics, and no label `model_name`."""
        self._engine = engine
        self._vllm_names = vllm_names
        self.registry = CollectorRegistry()
        self.in_flight = 0
        self.reports: Callable[[], Sequence[Report]] = tuple
        self._of_engine = CollectorRegistry()
        self._tenants: set[str] = set()
        self._tenants_max = tenants_max
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.tenant_requests = counter(
            "vsched_tenant_requests",
            "Requests with a tenant, by tenant and outcome.",
            ("tenant", "outcome"),
        )
        self.tenant_tokens = counter(
            "vsched_tenant_tokens",
            "Tokens of finished requests by tenant: prompt and output.",
            ("tenant", "kind"),
        )
        self.requests = counter(
            "vsched_requests", "Requests by endpoint and outcome.", ("endpoint", "outcome")
        )
        self.prompt_tokens = counter("vsched_prompt_tokens", "Prompt tokens of finished requests.")
        self.cached_tokens = counter(
            "vsched_prompt_tokens_cached", "Prompt tokens of finished requests that were cached."
        )
        self.output_tokens = counter(
            "vsched_generation_tokens", "Output tokens of finished requests."
        )
        self.first_token_s = histogram(
            "vsched_time_to_first_token_seconds",
            "Time from arrival to the first output.",
            buckets=_FIRST_TOKEN_S,
        )
        self.between_tokens_s = _Times(
            "vsched_inter_token_latency_seconds",
            "Time between two outputs of a request.",
            _BETWEEN_TOKENS_S,
        )
        self.registry.register(self.between_tokens_s)
        self.request_s = histogram(
            "vsched_e2e_request_latency_seconds",
            "Time from arrival to the end.",
            buckets=_REQUEST_S,
        )
        if engine is not None:
            self._of_engine.register(
                EngineCollector(engine.statistics, engine.groups, engine.adapters)
            )

    def begin_request(self, endpoint: str, *, tenant: str = "") -> RequestRecord:
        """Start recording one request."""
        return RequestRecord(self, endpoint, self._label(tenant))

    def _label(self, tenant: str) -> str:
        """Label of a tenant: its name, unless there are too many, because labels are never freed."""
        if tenant and tenant not in self._tenants:
            if len(self._tenants) >= self._tenants_max:
                return OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant

    @property
    def under_way(self) -> int:
        """Number of requests in progress in all processes."""
        return self.in_flight + sum(report.in_flight for report in self.reports())

    def report(self) -> Report:
        """Return the metrics of this process."""
        families: list[Family] = []
        for metric in self.registry.collect():
            # Without creation times, which cannot be added.
            kept = [one for one in metric.samples if not one.name.endswith("_created")]
            samples = [(one.name, one.labels, float(one.value)) for one in kept]
            families.append((metric.name, metric.documentation, metric.type, samples))
        return Report(self.in_flight, families)

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all processes and of the engine."""
        model_name = self._engine.model_name if self._engine is not None else ""
        everywhere = []
        for name, what, kind, samples in added([self.report(), *self.reports()]):
            everywhere.append(Metric(name, what, kind))
            for sample in samples:
                everywhere[-1].add_sample(*sample)
        yield from exposed(
            chain(everywhere, self._of_engine.collect()),
            model_name=model_name,
            vllm_names=self._vllm_names,
        )


class RequestRecord:
    """Records the metrics of one request."""

    def __init__(self, metrics: ApiMetrics, endpoint: str, tenant: str = "") -> None:
        self._metrics = metrics
        self._tenant = tenant
        self._endpoint = endpoint
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}
        metrics.in_flight += 1

    def output(self, answer: int = 0) -> None:
        """Record output of a choice, by its index."""
        now, last = time.perf_counter(), self._last.get(answer)
        if last is not None:
            self._metrics.between_tokens_s.observe(now - last)
        elif not self._last:
            self._metrics.first_token_s.observe(now - self._began)
        self._last[answer] = now

    def tokens(self, usage: Usage) -> None:
        """Count the tokens of an accepted request, once, at its end."""
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.cached_tokens.inc(usage.prompt_tokens_details.cached_tokens)
        self._metrics.output_tokens.inc(usage.completion_tokens)
        if self._tenant:
            tokens = self._metrics.tenant_tokens
            tokens.labels(self._tenant, "prompt").inc(usage.prompt_tokens)
            tokens.labels(self._tenant, "output").inc(usage.completion_tokens)

    def end_request(self, outcome: str) -> None:
        """Count the request."""
        self._metrics.in_flight -= 1
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        if self._tenant:
            self._metrics.tenant_requests.labels(self._tenant, outcome).inc()
        self._metrics.request_s.observe(time.perf_counter() - self._began)


Family = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]
"""Name, description, type and samples of a metric: name, labels and value."""


class Report(NamedTuple):
    """Metrics of one process: requests in flight, and metric families."""

    in_flight: int = 0
    families: Sequence[Family] = ()


def added(reports: Iterable[Report]) -> list[Family]:
    """Sum all families, in order of first occurrence."""
    families: dict[str, Family] = {}
    for report in reports:
        for name, what, kind, samples in report.families:
            held = families.setdefault(name, (name, what, kind, []))[3]
            known = {(one, tuple(labels.values())): at for at, (one, labels, _) in enumerate(held)}
            for one, labels, value in samples:
                at = known.get((one, tuple(labels.values())))
                if at is None:
                    held.append((one, labels, value))
                else:
                    held[at] = (one, labels, held[at][2] + value)
    return list(families.values())
