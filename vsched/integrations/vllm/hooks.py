"""The places of vLLM's scheduler that this bridge relies on, and the check that a version has them.

The scheduler of vLLM is no public interface: it may change with each release. The names that its `schedule()` uses are
read from its compiled code, so that a hook that is not called any more is found at start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TESTED_VERSIONS = ("0.31.0", "0.32.0", "0.33.0")
"""Versions with which `tests/vllm` passes; of 0.33.0 the Python code only, without a build for CPUs."""
USED_BY_SCHEDULE: Mapping[str, tuple[str, ...]] = {
    "generate.admission": (
        "waiting",
        "peek_request",
        "pop_request",
        "prepend_requests",
        "kv_holding_waiting",
    ),
    "generate.step": ("_reserve_prefill_lookahead", "running"),
    "generate.preemption": ("allocate_slots", "policy", "PRIORITY", "max", "_preempt_request"),
}
METHODS: Mapping[str, tuple[str, ...]] = {
    "generate.admission": (
        "_handle_blocked_waiting_request",
        "_is_blocked_waiting_status",
        "_free_request",
    ),
    "generate.step": ("_preempt_request", "_free_request"),
    "generate.preemption": (),
}


def missing_hooks(scheduler: Any, tables: Iterable[str]) -> dict[str, str]:
    """Return the reasons why policies of these tables cannot decide in this scheduler, by table."""
    base: Any = next(cls for cls in type(scheduler).__mro__ if cls.__module__.startswith("vllm."))
    code = base.schedule.__code__
    found: dict[str, str] = {}
    for table in tables:
        unused = [name for name in USED_BY_SCHEDULE[table] if name not in code.co_names]
        lacking = [name for name in METHODS[table] if not hasattr(scheduler, name)]
        if unused or lacking:
            found[table] = f"this version of vLLM has no {', '.join([*lacking, *unused])}"
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        reason = "chunks of this model must end at states, and a limited one would not"
        found.setdefault("generate.step", reason)
    return found
