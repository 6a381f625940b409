"""Prometheus metrics of requests, such as latencies; names are vLLM's if it has the same metric."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vsched.aio.streams import Histogram as PlainHistogram
from vsched.api.contract import EngineContract
from vsched.api.metrics.engine import EngineCollector, cumulative, exposed

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
        self.tenant_requests = Counter(
            "vsched_tenant_requests",
            "Requests with a tenant, by tenant and outcome.",
            ("tenant", "outcome"),
            registry=self.registry,
        )
        self.tenant_tokens = Counter(
            "vsched_tenant_tokens",
            "Tokens of finished requests by tenant: prompt and output.",
            ("tenant", "kind"),
            registry=self.registry,
        )
        self.requests = Counter(
            "vsched_requests",
            "Requests by endpoint and outcome.",
            ("endpoint", "outcome"),
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "vsched_prompt_tokens", "Prompt tokens of finished requests.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "vsched_prompt_tokens_cached",
            "Prompt tokens of finished requests that were cached.",
            registry=self.registry,
        )
        self.output_tokens = Counter(
            "vsched_generation_tokens",
            "Output tokens of finished requests.",
            registry=self.registry,
        )
        self.first_token_s = Histogram(
            "vsched_time_to_first_token_seconds",
            "Time from arrival to the first output.",
            buckets=_FIRST_TOKEN_S,
            registry=self.registry,
        )
        self.between_tokens_s = _Times(
            "vsched_inter_token_latency_seconds",
            "Time between two outputs of a request.",
            _BETWEEN_TOKENS_S,
        )
        self.registry.register(self.between_tokens_s)
        self.request_s = Histogram(
            "vsched_e2e_request_latency_seconds",
            "Time from arrival to the end.",
            buckets=_REQUEST_S,
            registry=self.registry,
        )
        if engine is not None:
            self._of_engine.register(
                EngineCollector(engine.statistics, engine.groups, engine.adapters)
            )

    def begin(self, endpoint: str, *, tenant: str = "") -> RequestRecord:
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
        return Report(
            self.in_flight, [MetricSamples.of(metric) for metric in self.registry.collect()]
        )

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all processes and of the engine."""
        model_name = self._engine.model_name if self._engine is not None else ""
        everywhere = Added([self.report(), *self.reports()])
        yield from exposed(
            chain(everywhere.collect(), self._of_engine.collect()),
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

    def tokens(self, *, prompt: int, cached: int, output: int) -> None:
        """Count the tokens of an accepted request, once, at its end."""
        self._metrics.prompt_tokens.inc(prompt)
        self._metrics.cached_tokens.inc(cached)
        self._metrics.output_tokens.inc(output)
        if self._tenant:
            self._metrics.tenant_tokens.labels(self._tenant, "prompt").inc(prompt)
            self._metrics.tenant_tokens.labels(self._tenant, "output").inc(output)

    def end(self, outcome: str) -> None:
        """Count the request."""
        self._metrics.in_flight -= 1
        self._metrics.requests.labels(self._endpoint, outcome).inc()
        if self._tenant:
            self._metrics.tenant_requests.labels(self._tenant, outcome).inc()
        self._metrics.request_s.observe(time.perf_counter() - self._began)


Sample = tuple[str, dict[str, str], float]
"""Name, labels and value."""


class MetricSamples(msgspec.Struct, frozen=True, array_like=True):
    """The samples of one metric."""

    name: str
    what: str
    kind: str
    samples: list[Sample]

    @classmethod
    def of(cls, metric: Metric) -> MetricSamples:
        """Convert a metric, without creation times, which cannot be added."""
        samples = [
            (one.name, one.labels, float(one.value))
            for one in metric.samples
            if not one.name.endswith("_created")
        ]
        return cls(metric.name, metric.documentation, metric.type, samples)


class Report(msgspec.Struct, frozen=True, array_like=True):
    """Metrics of one process: requests in flight, and metric families."""

    in_flight: int = 0
    families: list[MetricSamples] = []


class Added(Collector):
    """Sums the counters and histograms of several processes."""

    def __init__(self, reports: Iterable[Report]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        """Yield every family, with the sums of its samples."""
        for family in added(self._reports):
            metric = Metric(family.name, family.what, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def added(reports: Iterable[Report]) -> list[MetricSamples]:
    """Sum all families; samples are in order of first occurrence."""
    families: dict[str, MetricSamples] = {}
    sums: dict[str, dict[tuple[str, tuple[str, ...]], Sample]] = {}
    for report in reports:
        for family in report.families:
            families.setdefault(family.name, family)
            known = sums.setdefault(family.name, {})
            for name, labels, value in family.samples:
                key = (name, tuple(labels.values()))
                found = known.get(key)
                known[key] = (name, labels, value + (found[2] if found is not None else 0))
    return [
        msgspec.structs.replace(family, samples=list(sums[name].values()))
        for name, family in families.items()
    ]
