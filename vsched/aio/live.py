"""The state of an engine at one moment, for the live page and `vsched top`; built when asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vsched.aio.shell import Shell
from vsched.aio.timelines import RequestTimeline
from vsched.kernel.live import MemoryMap, RequestRow
from vsched.plugins import registered_policies
from vsched.policy import KERNEL_TABLES, POLICY_TABLES, Policy
from vsched.policy_host.seats import table_of

COUNTERS = ("running", "waiting", "finished", "refused", "arrival", "media")
"""Entries of the engine's statistics that a state has."""
REQUESTS_MAX = 256
"""Maximum number of requests in a state; all with a slot are in it."""


class LivePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy of a seat, or of equal seats of all groups.

    Attributes:
        table: Path of its configuration table.
        use: Its registered name, or `module:Class`.
        fields: All its fields.
        choices: Names that may replace it while requests run; empty if that needs a restart.
        calls: Number of calls since the start.
        mean_us: Mean time of a call in microseconds.
        replaced: Why the default decides instead; empty if it does not.
        overruled: Number of valid answers that the kernel did not follow, by reason.
    """

    table: str
    use: str
    fields: dict[str, Any]
    choices: list[str] = []
    calls: int = 0
    mean_us: float = 0.0
    longest_ms: float = 0.0
    slow: int = 0
    faults: int = 0
    overruled: dict[str, int] = {}
    replaced: str = ""


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """All that operators see of an engine.

    Attributes:
        now_ns: Time of the kernel's clock, which all `_ns` fields use.
        requests: The requests, oldest first; see `REQUESTS_MAX`.
        requests_total: Number of all requests, in preparation, waiting and running.
        tenants: Running and waiting requests by tenant.
        groups: Rows as of `/admin/replicas`, with counters.
        kv: Maps of the KV blocks by group.
        pages: Map of the embedding pages; None without images.
        steps: The latest steps by generate group: end and duration in ns, decodes, prefill tokens.
        encodes: The latest encode steps: end and duration in ns, images, tokens.
        ended: The latest ended requests.
        counters: Sums over all groups.
        memory: Memory pools, lines and in-use bytes of the ledger, and resident memory of processes.
    """

    now_ns: int
    state: str
    model: str
    uptime_s: float
    requests: list[RequestRow] = []
    requests_total: int = 0
    tenants: dict[str, dict[str, int]] = {}
    groups: list[dict[str, Any]] = []
    kv: dict[str, MemoryMap] = {}
    pages: MemoryMap | None = None
    steps: dict[str, list[tuple[int, int, int, int]]] = {}
    encodes: list[tuple[int, int, int, int]] = []
    ended: list[RequestTimeline] = []
    policies: list[LivePolicy] = []
    counters: dict[str, Any] = {}
    memory: dict[str, Any] = {}


def served_state(shell: Shell) -> dict[str, Any]:
    """Return the fields of a `LiveState` that the scheduler knows."""
    kernel, now_ns = shell.kernel, shell.now_ns()
    requests = [*kernel.live_requests(REQUESTS_MAX, now_ns)]
    requests += shell.arriving(REQUESTS_MAX - len(requests), now_ns)
    return {
        "now_ns": now_ns,
        "requests": requests,
        "requests_total": len(kernel.requests) + len(shell.arrivals),
        "tenants": kernel.tenants(),
        "kv": {group.name: group.block_map() for group in kernel.generators},
        "pages": kernel.embeddings.map() if shell.limits.encoders else None,
        "steps": {
            group.name: [
                (ended_ns, busy_ns or gap_ns, of[0], of[1])
                for ended_ns, busy_ns, gap_ns, of, _ in group.measures.steps
            ]
            for group in kernel.generators
        },
        "encodes": [
            (one.ended_ns, one.took_ns, one.items, one.tokens) for one in kernel.encode.encodes
        ],
    }


def live_policies(
    tables: Mapping[str, Mapping[str, Any]],
    policies: Mapping[str, Policy],
    statistics: Mapping[str, Any],
    failures: Mapping[str, int],
) -> list[LivePolicy]:
    """Return the policies in force, in the order of the configuration."""
    replaced, overruled = (
        statistics.get("policy_replaced", {}),
        statistics.get("policy_overruled", {}),
    )
    found = []
    for table in POLICY_TABLES:
        seats = [seat for seat in statistics.get("policy_calls", {}) if table_of(seat) == table]
        times = [statistics["policy_calls"][seat] for seat in seats]
        calls = sum(each["calls"] for each in times)
        reasons: dict[str, int] = {}
        for seat in seats:
            for reason, count in overruled.get(seat, {}).items():
                reasons[reason] = reasons.get(reason, 0) + count
        found.append(
            LivePolicy(
                table=table,
                use=str(tables.get(table, {}).get("use", "")),
                fields=msgspec.to_builtins(policies[table], enc_hook=str),
                choices=registered_policies(POLICY_TABLES[table]) if table in KERNEL_TABLES else [],
                calls=calls,
                mean_us=round(sum(each["seconds"] for each in times) * 1e6 / max(calls, 1), 1),
                longest_ms=max((each["longest_ms"] for each in times), default=0.0),
                slow=sum(each["slow"] for each in times),
                faults=sum(failures.get(seat, 0) for seat in seats),
                overruled=reasons,
                replaced=next((replaced[seat] for seat in seats if seat in replaced), ""),
            )
        )
    return found
