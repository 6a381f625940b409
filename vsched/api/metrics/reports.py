"""Metrics of API processes, sent to the process that exposes the totals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_SINCE = "_created"
"""Suffix of creation times: in a total, the earliest one is used."""

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
        """Convert a metric."""
        samples = [(one.name, one.labels, float(one.value)) for one in metric.samples]
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
                if found is not None:
                    value = min(found[2], value) if name.endswith(_SINCE) else found[2] + value
                known[key] = (name, labels, value)
    return [
        msgspec.structs.replace(family, samples=list(sums[name].values()))
        for name, family in families.items()
    ]
