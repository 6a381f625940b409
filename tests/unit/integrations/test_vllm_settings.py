"""Which policies vLLM follows, and the sentences about the others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vsched.config import load_config
from vsched.errors import ConfigError, PolicyError
from vsched.integrations.vllm.hooks import METHODS, USED_BY_SCHEDULE, missing_hooks
from vsched.integrations.vllm.settings import FRONT, SCHEDULER, read_settings
from vsched_policies.requests import TenantFair


def settings(tables: object, called: tuple[str, ...] = SCHEDULER) -> Any:
    return read_settings(SimpleNamespace(additional_config={"vsched": tables}), "0.32.0", called)


def test_tables_are_those_of_vsched(tmp_path: Path) -> None:
    file = tmp_path / "policies.toml"
    file.write_text(
        '[generate]\nstep_target_ms = 20\n[generate.step]\nuse = "slo-feedback"\n[server]\nport = 1\n'
        "[policies]\ncall_budget_ms = 5\n[vllm]\ntrace = 'run.jsonl'\n[arrival]\nuse = 'open'\n"
    )
    found = settings(str(file))
    assert [*found.policies.by_table] == ["generate.step"]
    assert found.target.step_target_ms == 20
    assert found.limits.call_budget_ms == 5
    assert found.server.port == 1
    assert found.vllm.trace == "run.jsonl"
    config = load_config(file, environ={})
    assert config.policies.by_table["generate.step"] == found.policies.by_table["generate.step"]


def test_one_policy_decides_if_vllm_can_follow_it() -> None:
    tables = {"policy": {"use": "tenant-fair"}}
    found = settings(tables)
    assert {*found.policies.by_table} == {*SCHEDULER}
    assert {type(one) for one in found.policies.by_table.values()} == {TenantFair}
    assert [*settings(tables, FRONT).policies.by_table] == ["arrival"]


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"encode": {"dispatch": {"use": "fewest-held-up"}}}, "vLLM 0.32.0: it has no encode"),
        ({"generate": {"memory": {"use": "pinned", "tokens": 1}}}, "sizes its KV cache itself"),
        ({"generate": {"preemption": {"use": "swap-long"}}}, r"SwapLong needs swap .*\(swap\)"),
        ({"policy": {"use": "tenant-fair", "seats": ["encode.admission"]}}, "not decided"),
    ],
)
def test_a_policy_that_vllm_cannot_follow_is_refused(tables: object, sentence: str) -> None:
    with pytest.raises((PolicyError, ConfigError), match=sentence):
        settings(tables)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ("/no/such/file.toml", "cannot be read as TOML"),
        (3, "neither a path nor tables"),
        ({"generate": {"step_target_ms": -1}}, "generate: .*step_target_ms"),
        ({"vllm": {"trase": ""}}, "vllm: .*trase"),
        ({"server": {"tenant_heder": "x-tenant"}}, "server: .*tenant_heder"),
        ({"generate": {"step": {"use": "nothing"}}}, "generate.step.use: 'nothing' is unknown"),
    ],
)
def test_a_wrong_value_is_named(tables: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings(tables)


def test_no_tables_are_no_policies() -> None:
    config = SimpleNamespace(additional_config=json.loads("{}"))
    assert not read_settings(config, "0.32.0", SCHEDULER).policies.by_table


# --- a version of vLLM without a hook ---

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
