"""From a configuration to worker groups: groups, devices, and the facts of the model for each rank."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.configs import config_of
from tests.unit.rank.fake_plugin import FakePlugin, model_info
from vsched.assembly import (
    arena_layout,
    as_served,
    check_parallel,
    create_sizing,
    inspect_checkpoint,
    inspect_draft,
    memory_in_use,
    rank_kv_bytes_per_token,
    rank_specs,
    scheduler_limits,
    verifies_drafts,
)
from vsched.config import Config, load_config, resolve_policies
from vsched.engine import Engine
from vsched.errors import CheckpointError, ConfigError, PolicyError
from vsched.sim.ranks.plugin import HYBRID, NAME, plugin
from vsched.transport.arena import Arena
from vsched.types import ModelInfo, SamplingDefaults, SamplingParams

INFO = model_info()


NO_IMAGES = {"encode": {"pages_total": 0, "pages_free": 0, "pages_evictable": 0}}


def with_state(size: int) -> ModelInfo:
    """Return a model with a recurrent state of this size."""
    return replace(INFO, state_bytes=size)


TWO_BY_TWO = (
    "encode.replicas=2",
    "generate.replicas=2",
    "encode.tensor_parallel=2",
    "generate.tensor_parallel=2",
)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ((), [(["encode"], 1), (["generate"], 1)]),
        (("placement=together",), [(["encode", "generate"], 1)]),
        (("encode.replicas=0",), [(["generate"], 1)]),
        (("encode.replicas=0", "placement=together"), [(["generate"], 1)]),
        (("generate.replicas=2", "generate.tensor_parallel=4"),
         [(["encode"], 1), (["generate-0"], 4), (["generate-1"], 4)]),
        ((*TWO_BY_TWO, "placement=together"),
         [(["encode-0", "generate-0"], 2), (["encode-1", "generate-1"], 2)]),
    ],
)  # fmt: skip
def test_worker_groups_follow_replicas_and_placement(
    sets: tuple[str, ...], expected: list[tuple[list[str], int]]
) -> None:
    """Worker group i of two stages together serves encode-i and generate-i."""
    config, info = as_served(config_of(*sets), INFO)
    specs = rank_specs(config, info, resolve_policies(config))
    assert [([*spec.groups], spec.ranks) for spec in specs] == expected


def test_model_of_text_alone_is_served_without_anything_for_images() -> None:
    """No encode group, an arena of nothing, all threads for generating, and no line in the ledger."""
    config, info = as_served(config_of("placement=together"), INFO.text_alone)
    policies = resolve_policies(config)
    assert [spec.groups for spec in rank_specs(config, info, policies)] == [("generate",)]
    assert not config.encode_pauses
    assert (config.ranks, config.processes_on("local")) == (1, 1)
    layout = arena_layout(config, info)
    assert layout.total_bytes == 0
    limits = scheduler_limits(config, info, policies, blocks=7)
    assert (limits.encoders, limits.pages) == (0, 0)
    assert not create_sizing(config, info, policies)._more
    arena = Arena.create(layout)
    assert (arena.pixels.nbytes, arena.embeddings.size) == (0, 0)
    arena.close()


@pytest.mark.parametrize(
    ("device", "first_devices"),
    [("cpu", ["cpu", "cpu"]), ("cuda", ["cuda:0", "cuda:2"]), ("cuda:4", ["cuda:4", "cuda:6"])],
)
def test_replicas_take_the_devices_behind_each_other(device: str, first_devices: list[str]) -> None:
    """Rank r of replica i takes device N + i * tensor_parallel + r; the worker group adds r."""
    config = config_of(*TWO_BY_TWO, f"generate.device={device}")
    specs = rank_specs(config, INFO, resolve_policies(config))
    roles = [spec.generate for spec in specs if spec.generate is not None]
    assert [role.settings.device for role in roles] == first_devices


def test_threads_are_fixed_if_the_configuration_sets_them() -> None:
    config = config_of("placement=separate", "generate.threads=2")
    specs = rank_specs(config, INFO, resolve_policies(config))
    roles = [spec.encode or spec.generate for spec in specs]
    assert [role.settings.threads_fixed for role in roles if role is not None] == [False, True]


def test_batch_cap_of_encoders_is_shared_by_replicas() -> None:
    """Batch 8 over 2 replicas is 4, for the ranks and for the kernel."""
    config = config_of("encode.replicas=2", "encode.admission.max_items=8")
    policies = resolve_policies(config)
    specs = rank_specs(config, INFO, policies)
    assert [spec.encode.items for spec in specs if spec.encode is not None] == [4, 4]
    limits = scheduler_limits(config, INFO, policies, blocks=7)
    assert (limits.encode_items, limits.encoders, limits.generators) == (4, 2, 1)


@pytest.mark.parametrize(("fact", "longest"), [("item_atomic", 900), ("prompt_atomic", 1000)])
def test_a_step_holds_each_bidirectional_span(fact: str, longest: int) -> None:
    """Kernel and profiling run use chunks of that length, and an image that fits no step is an error."""
    info = replace(INFO, item_tokens_max=900, **{fact: True})
    config = config_of(
        "generate.max_batch_tokens=1010", "generate.slots=10", "generate.chunk_tokens=64"
    )
    policies = resolve_policies(config)
    limits = scheduler_limits(config, info, policies, blocks=7)
    assert getattr(limits, fact)
    assert limits.chunk_tokens == 64
    assert limits.prefix_cache == (fact == "item_atomic")
    for spec in rank_specs(config, info, policies):
        assert spec.generate is None or spec.generate.limits.chunk_tokens == longest
    large = replace(info, item_tokens_max=1001)
    with pytest.raises(ConfigError, match="value 1000, limit at least 1001 tokens.*it to 1011"):
        scheduler_limits(config, large, policies, blocks=7)
    scheduler_limits(config.text_alone, large.text_alone, policies, blocks=7)


def test_kernel_gets_the_maximum_waiting_time_of_a_request() -> None:
    """0 is no limit."""
    for set_, expected_ns in (("deadlines.waiting_s=0", 0), ("deadlines.waiting_s=1.5", 1.5e9)):
        config = config_of(set_)
        limits = scheduler_limits(config, INFO, resolve_policies(config), blocks=1)
        assert limits.waiting_ns == expected_ns


def test_ranks_without_heads_of_their_own_keep_the_whole_kv_cache() -> None:
    config, info = config_of(*TWO_BY_TWO), replace(INFO, shares_kv=False)
    sizing = create_sizing(config, info, resolve_policies(config))
    assert sizing._view.bytes_per_token == INFO.kv_bytes_per_token


def test_rank_gets_its_share_of_the_kv_cache() -> None:
    """Bytes of a token on one rank; statistics sum over all ranks."""
    config = config_of(*TWO_BY_TWO)
    policies = resolve_policies(config)
    specs = rank_specs(config, INFO, policies)
    half = INFO.kv_bytes_per_token // 2
    assert {spec.info.kv_bytes_per_token for spec in specs} == {half}
    assert create_sizing(config, INFO, policies)._view.bytes_per_token == half
    statistics = {**NO_IMAGES, "generate": {"blocks_held": 3}}
    used = memory_in_use(statistics, None, config, INFO)
    one_cache = 3 * config.generate.block_size * INFO.kv_bytes_per_token
    assert used["kv"] == one_cache
    whole = replace(INFO, shares_kv=False)
    assert memory_in_use(statistics, None, config, whole)["kv"] == 2 * one_cache


@pytest.mark.parametrize(
    ("sets", "places"),
    [
        ((), 8),
        (("generate.state_snapshots=3",), 3),
        (("generate.state_snapshots=0",), 0),
        (("generate.prefix_cache=false",), 0),
    ],
)
def test_stateful_model_has_a_prefix_cache_with_snapshots(
    sets: tuple[str, ...], places: int
) -> None:
    config, info = config_of("generate.slots=8", *sets), with_state(9)
    policies = resolve_policies(config)
    limits = scheduler_limits(config, info, policies, blocks=9)
    assert (limits.state_snapshots, limits.prefix_cache) == (places, places > 0)
    assert scheduler_limits(config, INFO, policies, blocks=9).state_snapshots is None
    spec = rank_specs(config, info, policies)[-1]
    assert spec.generate is not None
    assert spec.generate.settings.state_snapshots == spec.generate.limits.state_snapshots == places
    assert spec.generate.settings.slots == 8
    assert create_sizing(config, info, policies)._view.state_bytes == (8 + places) * 9


def test_states_in_use_are_those_of_running_requests() -> None:
    statistics = {**NO_IMAGES, "generate": {"blocks_held": 0, "prefilling": 1, "decoding": 2}}
    assert memory_in_use(statistics, None, config_of(), with_state(9))["state"] == 3 * 9
    assert "state" not in memory_in_use(statistics, None, config_of(), INFO)


class OddPlugin:
    """A worker whose model has three heads."""

    requested: list[tuple[str, int]]

    def check_parallel(self, info: object, *, stage: str, ranks: int) -> None:
        self.requested.append((stage, ranks))
        if ranks == 2:
            raise CheckpointError("3 heads cannot be shared by 2 ranks")


def test_parallel_sizes_are_checked_before_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in refuses sizes that do not divide; one rank needs no check."""
    plugin: Any = OddPlugin()
    plugin.requested = []
    monkeypatch.setattr("vsched.assembly.load_worker", lambda name, path: plugin)
    check_parallel(config_of(), INFO)
    assert plugin.requested == []
    check_parallel(config_of("encode.tensor_parallel=3"), INFO)
    with pytest.raises(CheckpointError, match="3 heads"):
        check_parallel(config_of("generate.tensor_parallel=2"), INFO)
    assert plugin.requested == [("encode", 3), ("generate", 2)]


@pytest.mark.parametrize("sets", [(), TWO_BY_TWO])
def test_swap_memory_is_places_for_blocks_of_each_rank(sets: tuple[str, ...]) -> None:
    """Kernel and ranks count the same places, and the ledger has a line for each rank, in the host's memory."""
    config = config_of("generate.swap_memory=1MiB", *sets)
    policies, replicas = resolve_policies(config), config.generate.replicas
    block_bytes = config.generate.block_size * rank_kv_bytes_per_token(config, INFO)
    places = (1 << 20) // block_bytes
    assert places > 0
    assert scheduler_limits(config, INFO, policies, blocks=9).swap_blocks == places
    spec = rank_specs(config, INFO, policies)[-1]
    assert spec.generate is not None
    assert spec.generate.limits.swap_blocks == places
    lines = [line for line in create_sizing(config, INFO, policies)._more if line.line == "swap"]
    assert [line.bytes for line in lines] == [places * block_bytes] * replicas**2
    assert {line.pool for line in lines} == {"host"}
    assert len({line.owner for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [("1", {}, "smaller than one KV block"), ("1GiB", {"state_bytes": 9}, "keep a state")],
)
def test_swap_memory_of_no_use_is_refused(size: str, changes: dict[str, int], message: str) -> None:
    config, info = config_of(f"generate.swap_memory={size}"), replace(INFO, **changes)
    with pytest.raises(ConfigError, match=rf"generate\.swap_memory.*{message}"):
        scheduler_limits(config, info, resolve_policies(config), blocks=9)


def test_int8_kv_cache_is_reported_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte for a value and two for the scale of a head; a plug-in without the number of heads is refused."""
    plugin = FakePlugin()
    found = replace(INFO, dtype="bfloat16", kv_bytes_per_token=256)
    monkeypatch.setattr("vsched.assembly.load_worker", lambda *_, **__: plugin)
    monkeypatch.setattr(plugin, "inspect", lambda *_, **__: found, raising=False)
    config = config_of("generate.kv_dtype=int8", "model.path=x")
    with pytest.raises(ConfigError, match=r"generate\.kv_dtype: .* heads of .*set it to auto"):
        inspect_checkpoint(config, resolve_policies(config))
    found = replace(found, kv_heads_per_token=8)
    info = inspect_checkpoint(config, resolve_policies(config))
    assert (info.kv_dtype, rank_kv_bytes_per_token(config, info)) == ("int8", 128 + 16)
    plain = config_of("model.path=x")
    assert inspect_checkpoint(plain, resolve_policies(plain)).kv_bytes_per_token == 256


def test_swapping_policy_without_swap_memory_is_refused() -> None:
    with pytest.raises(PolicyError, match="SwapLong .*set generate.swap_memory"):
        config_of("generate.preemption.use=swap-long")


def test_swap_memory_of_a_plugin_without_swaps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without swap memory it is served: it never has to swap."""
    plugin = FakePlugin()
    monkeypatch.setattr("vsched.assembly.load_worker", lambda *_, **__: plugin)
    monkeypatch.setattr(plugin, "inspect", lambda *_, **__: INFO, raising=False)
    for size, refused in (("0", False), ("1GiB", True)):
        config = config_of(f"generate.swap_memory={size}", "model.path=x")
        with pytest.raises(ConfigError, match="cannot swap") if refused else nullcontext():
            inspect_checkpoint(config, resolve_policies(config))


SIMULATED = plugin.inspect("model", dtype="auto", item_tokens_max=0)
STATEFUL = plugin.inspect(HYBRID, dtype="auto", item_tokens_max=0)
WITH_DRAFT = replace(SIMULATED, draft=SIMULATED.text_alone)
UNASKED = "generate.draft_model is loaded, and generate.drafting does not ask it"


def drafting(policy: str) -> Config:
    return config_of(f"generate.plugin={NAME}", f'generate.drafting={{use="{policy}"}}')


@pytest.mark.parametrize(
    ("policy", "warned"),
    [("draft-model", False), ("prompt-lookup", True), ("forced-tokens", True), ("none", True)],
)
def test_warning_about_an_unused_draft_model(
    policy: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = drafting(policy)
    assert verifies_drafts(config, WITH_DRAFT, resolve_policies(config))
    assert (UNASKED in caplog.text) == warned


def test_drafts_are_refused_without_their_requirements() -> None:
    asks = drafting("draft-model")
    with pytest.raises(ConfigError, match=r"drafts with a model, and there is none"):
        verifies_drafts(asks, SIMULATED, resolve_policies(asks))
    looks = drafting("prompt-lookup")
    assert verifies_drafts(looks, SIMULATED, resolve_policies(looks))
    with pytest.raises(ConfigError, match=r"cannot verify drafts"):
        verifies_drafts(looks, STATEFUL, resolve_policies(looks))
    nothing = drafting("none")
    assert not verifies_drafts(nothing, STATEFUL, resolve_policies(nothing))


def test_draft_model_gets_a_prompt_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for a model whose prompts are bidirectional: to the draft model they are ordinary tokens."""
    whole = replace(SIMULATED, prompt_atomic=True, item_atomic=True)
    monkeypatch.setattr(type(plugin), "inspect", lambda *_, **_given: whole)
    config = config_of(f"generate.plugin={NAME}", "generate.draft_model=small")
    found = inspect_draft(config, plugin, SIMULATED)
    assert found is not None
    assert not found.prompt_atomic
    assert not found.item_atomic
    with pytest.raises(ConfigError, match=r"generate\.draft_model: ranks cannot run drafts"):
        inspect_draft(config, plugin, STATEFUL)


DEMO = Path(__file__).parents[2] / "workers" / "demo-model"


@pytest.mark.parametrize(("used", "temperature"), [("true", 0.3), ("false", 1.0)])
def test_model_section_decides_which_defaults_come_from_the_checkpoint(
    tmp_path: Path, used: str, temperature: float
) -> None:
    path = shutil.copytree(DEMO, tmp_path / "copy")
    stated = {"eos_token_id": 2, "temperature": 0.3}
    (path / "generation_config.json").write_text(json.dumps(stated))
    sets = f"model.path={path}", "model.chat_template=mine.jinja", f"model.sampling_defaults={used}"
    loaded = load_config(None, sets=sets, environ={})
    info = inspect_checkpoint(loaded.config, loaded.policies)
    assert info.sampling == SamplingDefaults(temperature=temperature)
    engine = Engine(loaded.config)
    engine.info = info
    assert engine.default_sampling() == SamplingParams(max_tokens=0, temperature=temperature)
    assert info.chat_template == "mine.jinja"
