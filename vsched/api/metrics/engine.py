"""Engine counters as Prometheus families, read when scraped; labels are the group, rank, policy or reason.

Names are vLLM's if it has the same metric, with `vsched_` in place of `vllm:`; Prometheus reserves colons for recording
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

Statistics = Mapping[str, Any]

_TOTALS: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str], ...] = (
    (GaugeMetricFamily, "num_requests_waiting", "waiting", "Accepted requests without a slot."),
    (GaugeMetricFamily, "live_bytes", "live_bytes", "Memory held by accepted requests."),
    (GaugeMetricFamily, "uptime_seconds", "uptime_s", "Time since the engine was created."),
    (
        GaugeMetricFamily,
        "encode_items_waiting",
        "encode.waiting_items",
        "Images that wait for an encoder.",
    ),
    (CounterMetricFamily, "encode_items", "encode.items_encoded", "Images encoded."),
    (CounterMetricFamily, "encode_items_copied", "encode.items_copied", "Embeddings from clients."),
    (CounterMetricFamily, "encode_tokens", "encode.tokens_encoded", "Encoder output tokens."),
    (CounterMetricFamily, "encoder_cache_hits", "encode.cache_hits", "Embedding cache hits."),
    (CounterMetricFamily, "encoder_cache_misses", "encode.cache_misses", "Embedding cache misses."),
    (
        CounterMetricFamily,
        "encoder_cache_evictions",
        "encode.cache_evictions",
        "Embeddings evicted.",
    ),
    (
        CounterMetricFamily,
        "encoder_cache_preemptions",
        "encode.cache_preemptions",
        "Embeddings evicted for older requests.",
    ),
    (
        GaugeMetricFamily,
        "encoder_cache_entries",
        "encode.cache_entries",
        "Embeddings in the cache.",
    ),
    (GaugeMetricFamily, "encoder_cache_pages", "encode.pages_total", "Arena pages for embeddings."),
    (GaugeMetricFamily, "encoder_cache_pages_free", "encode.pages_free", "Free arena pages."),
    (
        GaugeMetricFamily,
        "encoder_cache_pages_evictable",
        "encode.pages_evictable",
        "Arena pages of embeddings that no request needs.",
    ),
    (GaugeMetricFamily, "media_preparing", "media.preparing", "Requests in preparation."),
    (GaugeMetricFamily, "media_preparing_bytes", "media.preparing_bytes", "Encoded bytes held."),
    (CounterMetricFamily, "media_processed", "media.processed", "Images decoded and processed."),
    (CounterMetricFamily, "media_embedded", "media.embedded", "Images received as embeddings."),
    (CounterMetricFamily, "media_repeated", "media.repeated", "Images found in the cache."),
    (CounterMetricFamily, "media_refused", "media.refused", "Requests refused for their images."),
    (
        GaugeMetricFamily,
        "decode_budget_bytes",
        "media.decode.bytes_total",
        "Memory for decoding images.",
    ),
    (
        GaugeMetricFamily,
        "decode_budget_used_bytes",
        "media.decode.bytes_used",
        "Decoding memory in use.",
    ),
    (GaugeMetricFamily, "pixel_bytes", "media.pixels.bytes_total", "Size of the pixel region."),
    (GaugeMetricFamily, "pixel_held_bytes", "media.pixels.bytes_held", "Pixels held by requests."),
    (GaugeMetricFamily, "pixel_kept_bytes", "media.pixels.bytes_kept", "Cached pixels."),
    (CounterMetricFamily, "pixel_cache_hits", "media.pixels.hits", "Pixel cache hits."),
    (CounterMetricFamily, "pixel_cache_misses", "media.pixels.misses", "Pixel cache misses."),
    (CounterMetricFamily, "pixel_cache_evictions", "media.pixels.evictions", "Pixels evicted."),
)
"""Type, name, path in the statistics, and description."""

_BY_REASON = (
    ("requests_finished", "finished_reason", "finished", "Accepted requests that ended."),
    ("requests_refused", "reason", "refused", "Requests that the scheduler refused."),
    (
        "policy_faults",
        "policy",
        "policy_faults",
        "Policy failures, after which the default decided.",
    ),
)
"""Counters with one label; its values are the keys of a dictionary in the statistics."""

_GENERATE: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str], ...] = (
    (GaugeMetricFamily, "load_tokens", "load_tokens", "Tokens still to be computed."),
    (GaugeMetricFamily, "requests_queued", "waiting", "Requests in the waiting queue."),
    (GaugeMetricFamily, "requests_prefilling", "prefilling", "Requests in prefill."),
    (GaugeMetricFamily, "requests_decoding", "decoding", "Requests that decode."),
    (GaugeMetricFamily, "steps_in_flight", "steps_in_flight", "Steps in flight."),
    (GaugeMetricFamily, "slots", "slots_total", "Maximum number of running requests."),
    (GaugeMetricFamily, "kv_blocks", "blocks_total", "KV blocks."),
    (GaugeMetricFamily, "kv_blocks_held", "blocks_held", "KV blocks held by requests."),
    (
        GaugeMetricFamily,
        "kv_blocks_cached",
        "blocks_cached",
        "KV blocks held only by the prefix cache.",
    ),
    (CounterMetricFamily, "num_preemptions", "preemptions", "Preempted requests."),
    (GaugeMetricFamily, "num_requests_swapped", "swapped", "Requests swapped to host memory."),
    (
        GaugeMetricFamily,
        "swap_blocks",
        "swap_blocks_total",
        "Swap space in host memory, in KV blocks.",
    ),
    (GaugeMetricFamily, "swap_blocks_held", "swap_blocks_held", "Swapped-out KV blocks."),
    (CounterMetricFamily, "swap_blocks_out", "swap_blocks_out", "Blocks copied to host memory."),
    (CounterMetricFamily, "swap_blocks_in", "swap_blocks_in", "Blocks copied back."),
    (CounterMetricFamily, "requests_admitted", "admitted", "Requests admitted to a slot."),
    (CounterMetricFamily, "tokens_prefilled", "tokens_prefilled", "Prompt tokens computed."),
    (CounterMetricFamily, "tokens_decoded", "tokens_decoded", "Tokens decoded."),
    (CounterMetricFamily, "tokens_drafted", "tokens_drafted", "Draft tokens proposed."),
    (CounterMetricFamily, "drafts_accepted", "drafts_accepted", "Draft tokens accepted."),
    (CounterMetricFamily, "prefix_cache_hits", "tokens_cached", "Prefix cache hits, in tokens."),
    (
        CounterMetricFamily,
        "prefix_cache_evictions",
        "prefix_evictions",
        "Prefix cache blocks evicted.",
    ),
)
"""Type, name, key in a generate group's statistics, and description."""


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
            counter = CounterMetricFamily(f"vsched_{name}", what, labels=(label,))
            for reason, count in statistics.get(path, {}).items():
                counter.add_metric((reason,), count)
            yield counter
        yield from _policy_calls(statistics)
        yield from _generate_groups(_at(statistics, "generate.groups") or {})
        yield from _rank_memory(statistics.get("ranks", {}))
        yield from _rank_threads(statistics.get("threads", {}))
        yield from _all_groups(self._groups())
        yield from _all_adapters(self._adapters())


def _at(statistics: Statistics, path: str) -> Any:
    found: Any = statistics
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def _generate_groups(groups: Mapping[str, Statistics]) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        "vsched_num_requests_running", "Requests with a slot.", labels=("group",)
    )
    usage = GaugeMetricFamily(
        "vsched_kv_cache_usage_perc", "Fraction of KV blocks held by requests.", labels=("group",)
    )
    for name, group in groups.items():
        running.add_metric((name,), group["prefilling"] + group["decoding"])
        usage.add_metric((name,), group["blocks_held"] / max(group["blocks_total"], 1))
    yield running
    yield usage
    for kind, metric, key, what in _GENERATE:
        family = kind(f"vsched_{metric}", what, labels=("group",))
        for name, group in groups.items():
            family.add_metric((name,), group[key])
        yield family


def _policy_calls(statistics: Statistics) -> Iterator[Metric]:
    overruled = CounterMetricFamily(
        "vsched_policy_overruled",
        "Valid policy answers that the kernel did not follow.",
        labels=("seat", "reason"),
    )
    for seat, reasons in statistics.get("policy_overruled", {}).items():
        for reason, count in reasons.items():
            overruled.add_metric((seat, reason), count)
    passed = GaugeMetricFamily(
        "vsched_passed_over_seconds_max",
        "Longest time for which policies let others pass a request or an image.",
        labels=("group",),
    )
    for group, seconds in statistics.get("passed_over_s", {}).items():
        passed.add_metric((group,), seconds)
    yield from (overruled, passed)
    seconds = SummaryMetricFamily(
        "vsched_policy_call_seconds", "Policy calls and their duration.", labels=("seat",)
    )
    slow = CounterMetricFamily(
        "vsched_policy_slow_calls", "Policy calls over policies.call_budget_ms.", labels=("seat",)
    )
    replaced = GaugeMetricFamily(
        "vsched_policy_replaced", "1 if the default has replaced the policy.", labels=("seat",)
    )
    gone = statistics.get("policy_replaced", {})
    for seat, calls in statistics.get("policy_calls", {}).items():
        seconds.add_metric((seat,), count_value=calls["calls"], sum_value=calls["seconds"])
        slow.add_metric((seat,), calls["slow"])
        replaced.add_metric((seat,), seat in gone)
    yield from (seconds, slow, replaced)


def _rank_memory(ranks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "vsched_rank_memory_bytes", "Memory of a rank, by kind.", labels=("group", "rank", "kind")
    )
    for group, members in ranks.items():
        for rank, memory in members.items():
            for kind, size in memory.items():
                family.add_metric((group, rank, kind), size)
    yield family


def _rank_threads(ranks: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Iterator[Metric]:
    active = GaugeMetricFamily(
        "vsched_rank_threads",
        "Compute threads in use: fewer while other programs keep the cores busy.",
        labels=("group", "rank"),
    )
    total = GaugeMetricFamily(
        "vsched_rank_threads_max", "Compute threads of a rank.", labels=("group", "rank")
    )
    for group, members in ranks.items():
        for rank, threads in members.items():
            active.add_metric((group, rank), threads["active"])
            total.add_metric((group, rank), threads["total"])
    yield from (active, total)


def _all_groups(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    up = GaugeMetricFamily("vsched_group_up", "1 if the group is up.", labels=("group",))
    restarts = CounterMetricFamily(
        "vsched_group_restarts", "Restarts of a group.", labels=("group",)
    )
    losses = CounterMetricFamily(
        "vsched_group_losses", "Losses of a group, by reason.", labels=("group", "reason")
    )
    busy = CounterMetricFamily(
        "vsched_group_busy_seconds", "Compute time of a group's ranks.", labels=("group",)
    )
    late = GaugeMetricFamily(
        "vsched_rank_kernels_late",
        "Kernels compiled or read from disk while the rank served.",
        labels=("group", "rank"),
    )
    for row in rows:
        name = row["name"]
        for rank in row.get("ranks", ()):
            late.add_metric((name, str(rank["rank"])), rank["kernels_late"])
        up.add_metric((name,), row["state"] == "up")
        restarts.add_metric((name,), row.get("restarts", 0))
        busy.add_metric((name,), row.get("busy_ms", 0) / 1000)
        for reason, count in row.get("losses", {}).items():
            losses.add_metric((name, reason), count)
    yield from (up, restarts, losses, busy, late)


def _all_adapters(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        "vsched_adapter_requests_running",
        "Running requests with this adapter.",
        labels=("adapter",),
    )
    requests = CounterMetricFamily(
        "vsched_adapter_requests",
        "Requests with this adapter since it was loaded.",
        labels=("adapter",),
    )
    for row in rows:
        running.add_metric((row["name"],), row.get("running", 0))
        requests.add_metric((row["name"],), row.get("requests", 0))
    yield from (running, requests)
