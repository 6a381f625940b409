"""A version of vLLM without a hook: its policy is off, with a reason, and the others decide."""

from __future__ import annotations

from typing import Any

from vsched.integrations.vllm.hooks import METHODS, USED_BY_SCHEDULE, missing_hooks
from vsched.integrations.vllm.settings import SCHEDULER

ALL_NAMES = sorted({name for names in USED_BY_SCHEDULE.values() for name in names})


def scheduler(*, without: str = "", **more: Any) -> Any:
    """Return an object of a class of `vllm` whose `schedule()` uses all names but one."""
    body = "".join(f"    self.{name}\n" for name in ALL_NAMES if name != without)
    space: dict[str, Any] = {}
    exec(f"def schedule(self):\n{body}", space)
    methods = {name: None for names in METHODS.values() for name in names if name != without}
    members = {"schedule": space["schedule"], **methods, **more, "__module__": "vllm.v1.fake"}
    return type("Scheduler", (), members)()


def test_complete_version_misses_nothing() -> None:
    assert missing_hooks(scheduler(), SCHEDULER) == {}


def test_hook_that_schedule_does_not_use_any_more_switches_its_policy_off() -> None:
    found = missing_hooks(scheduler(without="_reserve_prefill_lookahead"), SCHEDULER)
    assert found == {"generate.step": "this version of vLLM has no _reserve_prefill_lookahead"}
    found = missing_hooks(scheduler(without="_handle_blocked_waiting_request"), SCHEDULER)
    assert found.keys() == {"generate.admission"}


def test_chunks_that_must_end_at_states_are_not_limited() -> None:
    found = missing_hooks(scheduler(need_mamba_block_aligned_split=True), SCHEDULER)
    assert found.keys() == {"generate.step"}
