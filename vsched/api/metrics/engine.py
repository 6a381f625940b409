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
    (GaugeMetricFamily, "live_bytes", "live_bytes", "Bytes that accepted requests hold."),
    (GaugeMetricFamily, "uptime_seconds", "uptime_s", "Since the engine was made."),
    (GaugeMetricFamily, "encode_items_waiting", "encode.waiting_items", "Images that wait."),
    (CounterMetricFamily, "encode_items", "encode.items_encoded", "Images encoded."),
    (CounterMetricFamily, "encode_items_copied", "encode.items_copied", "Embeddings received."),
    (CounterMetricFamily, "encode_tokens", "encode.tokens_encoded", "Rows of embeddings made."),
    (CounterMetricFamily, "encoder_cache_hits", "encode.cache_hits", "Embeddings found."),
    (CounterMetricFamily, "encoder_cache_misses", "encode.cache_misses", "Embeddings not found."),
    (CounterMetricFamily, "encoder_cache_evictions", "encode.cache_evictions", "Evicted."),
    (
        CounterMetricFamily,
        "encoder_cache_preemptions",
        "encode.cache_preemptions",
        "Embeddings taken from younger requests.",
    ),
    (GaugeMetricFamily, "encoder_cache_entries", "encode.cache_entries", "Embeddings kept."),
    (GaugeMetricFamily, "encoder_cache_pages", "encode.pages_total", "Pages of embeddings."),
    (GaugeMetricFamily, "encoder_cache_pages_free", "encode.pages_free", "Those that are free."),
    (
        GaugeMetricFamily,
        "encoder_cache_pages_evictable",
        "encode.pages_evictable",
        "Those of embeddings that no request needs.",
    ),
    (GaugeMetricFamily, "media_preparing", "media.preparing", "Requests in preparation."),
    (GaugeMetricFamily, "media_preparing_bytes", "media.preparing_bytes", "Bytes they hold."),
    (CounterMetricFamily, "media_processed", "media.processed", "Images decoded and processed."),
    (CounterMetricFamily, "media_embedded", "media.embedded", "Images that came as embeddings."),
    (CounterMetricFamily, "media_repeated", "media.repeated", "Images that were there already."),
    (CounterMetricFamily, "media_refused", "media.refused", "Requests refused for their images."),
    (GaugeMetricFamily, "decode_budget_bytes", "media.decode.bytes_total", "Decoding memory."),
    (GaugeMetricFamily, "decode_budget_used_bytes", "media.decode.bytes_used", "That in use."),
    (GaugeMetricFamily, "pixel_bytes", "media.pixels.bytes_total", "Size of the pixel region."),
    (GaugeMetricFamily, "pixel_held_bytes", "media.pixels.bytes_held", "Held by requests."),
    (GaugeMetricFamily, "pixel_kept_bytes", "media.pixels.bytes_kept", "Kept for repetitions."),
    (CounterMetricFamily, "pixel_cache_hits", "media.pixels.hits", "Pixels found."),
    (CounterMetricFamily, "pixel_cache_misses", "media.pixels.misses", "Pixels not found."),
    (CounterMetricFamily, "pixel_cache_evictions", "media.pixels.evictions", "Evicted."),
)
"""Type, name, path in the statistics, and description."""

_BY_REASON = (
    ("requests_finished", "finished_reason", "finished", "Accepted requests that ended."),
    ("requests_refused", "reason", "refused", "Requests that the scheduler refused."),
    ("policy_faults", "policy", "policy_faults", "Failures of policies; the default decided."),
)
"""Counters with one label; its values are the keys of a dictionary in the statistics."""

_GENERATE: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str, str], ...] = (
    (GaugeMetricFamily, "load_tokens", "load_tokens", "Tokens that are still to be computed."),
    (GaugeMetricFamily, "requests_queued", "waiting", "Requests in the waiting queue."),
    (GaugeMetricFamily, "requests_prefilling", "prefilling", "Requests in prefill."),
    (GaugeMetricFamily, "requests_decoding", "decoding", "Requests that decode."),
    (GaugeMetricFamily, "steps_in_flight", "steps_in_flight", "Steps decided, not completed."),
    (GaugeMetricFamily, "slots", "slots_total", "Most requests that run at a time."),
    (GaugeMetricFamily, "kv_blocks", "blocks_total", "Blocks of the KV cache."),
    (GaugeMetricFamily, "kv_blocks_held", "blocks_held", "Those that requests hold."),
    (GaugeMetricFamily, "kv_blocks_cached", "blocks_cached", "Those kept for later prompts."),
    (CounterMetricFamily, "num_preemptions", "preemptions", "Preempted requests."),
    (GaugeMetricFamily, "num_requests_swapped", "swapped", "Requests in host memory."),
    (
        GaugeMetricFamily,
        "swap_blocks",
        "swap_blocks_total",
        "Blocks that host memory has room for.",
    ),
    (GaugeMetricFamily, "swap_blocks_held", "swap_blocks_held", "Those that hold one."),
    (CounterMetricFamily, "swap_blocks_out", "swap_blocks_out", "Blocks copied to host memory."),
    (CounterMetricFamily, "swap_blocks_in", "swap_blocks_in", "Blocks copied back."),
    (CounterMetricFamily, "requests_admitted", "admitted", "Requests that were given a slot."),
    (CounterMetricFamily, "tokens_prefilled", "tokens_prefilled", "Prompt tokens computed."),
    (CounterMetricFamily, "tokens_decoded", "tokens_decoded", "Tokens decoded."),
    (CounterMetricFamily, "tokens_drafted", "tokens_drafted", "Tokens drafted, right and wrong."),
    (CounterMetricFamily, "drafts_accepted", "drafts_accepted", "Drafts that proved right."),
    (CounterMetricFamily, "prefix_cache_hits", "tokens_cached", "Prompt tokens found cached."),
    (CounterMetricFamily, "prefix_cache_evictions", "prefix_evictions", "Blocks evicted."),
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
        "vsched_kv_cache_usage_perc", "KV blocks held; 1 is all of them.", labels=("group",)
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
    seconds = SummaryMetricFamily(
        "vsched_policy_call_seconds", "Calls of policies, and their time.", labels=("seat",)
    )
    slow = CounterMetricFamily(
        "vsched_policy_slow_calls", "Those over policies.call_budget_ms.", labels=("seat",)
    )
    replaced = GaugeMetricFamily(
        "vsched_policy_replaced", "Whether the default decides there.", labels=("seat",)
    )
    gone = statistics.get("policy_replaced", {})
    for seat, calls in statistics.get("policy_calls", {}).items():
        seconds.add_metric((seat,), count_value=calls["calls"], sum_value=calls["seconds"])
        slow.add_metric((seat,), calls["slow"])
        replaced.add_metric((seat,), seat in gone)
    yield from (seconds, slow, replaced)


def _rank_memory(ranks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "vsched_rank_memory_bytes", "What a rank said of it.", labels=("group", "rank", "kind")
    )
    for group, members in ranks.items():
        for rank, memory in members.items():
            for kind, size in memory.items():
                family.add_metric((group, rank, kind), size)
    yield family


def _rank_threads(ranks: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Iterator[Metric]:
    active = GaugeMetricFamily(
        "vsched_rank_threads",
        "Threads that it computes with now: fewer while other programs keep the cores busy.",
        labels=("group", "rank"),
    )
    total = GaugeMetricFamily(
        "vsched_rank_threads_max", "Threads that it has.", labels=("group", "rank")
    )
    for group, members in ranks.items():
        for rank, threads in members.items():
            active.add_metric((group, rank), threads["active"])
            total.add_metric((group, rank), threads["total"])
    yield from (active, total)


def _all_groups(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    up = GaugeMetricFamily("vsched_group_up", "Whether a group serves.", labels=("group",))
    restarts = CounterMetricFamily(
        "vsched_group_restarts", "How often its ranks came back.", labels=("group",)
    )
    losses = CounterMetricFamily(
        "vsched_group_losses", "How often it was lost, and why.", labels=("group", "reason")
    )
    busy = CounterMetricFamily(
        "vsched_group_busy_seconds", "Time that its ranks computed.", labels=("group",)
    )
    late = GaugeMetricFamily(
        "vsched_rank_kernels_late",
        "Kernels that it compiled, or read from disk, while it served.",
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
        "vsched_adapter_requests_running", "Requests that go on with it.", labels=("adapter",)
    )
    requests = CounterMetricFamily(
        "vsched_adapter_requests",
        "Requests that named it since it was loaded.",
        labels=("adapter",),
    )
    for row in rows:
        running.add_metric((row["name"],), row.get("running", 0))
        requests.add_metric((row["name"],), row.get("requests", 0))
    yield from (running, requests)
