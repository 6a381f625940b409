"""Tensor parallelism by transformers' plan, compared with `generate`; and refused models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.parity.architectures import ARCHITECTURES, COMMON, make_checkpoint
from tests.parity.compare import OUTPUTS, generated, prompts
from tests.workers.driver import Question
from tests.workers.parallel import ranks as on_rank
from tests.workers.parallel.ranks import Ranks
from vsched.errors import CheckpointError
from vsched.worker.contract import WorkerSettings
from vsched_workers.families.sharing import parallel_plan, shares_heads
from vsched_workers.parallel.slicing import PlannedRanks, share_by_plan
from vsched_workers.plugin import plugin

SHARED = ("cohere", "deepseek_v3", "mixtral", "olmo2", "phi3", "qwen3_moe", "starcoder2")
"""Split heads, split experts, gathered results, split inputs, linear layers with biases."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHARED, "gemma2", "llama", "mistral", "qwen3"])
def test_two_ranks_answer_as_generate(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """The last four have a decoder description, with its own table."""
    make_checkpoint(name, tmp_path)
    plugin.check_parallel(inspect(tmp_path), stage="generate", ranks=2)
    questions = [Question(prompt, count=OUTPUTS) for prompt in prompts()]
    found = ranks.run(on_rank.answer_text, str(tmp_path), questions)
    assert found[0] == found[1] == generated(tmp_path, prompts())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_four_ranks_answer_as_generate(ranks: Ranks, tmp_path: Path, name: str) -> None:
    make_checkpoint(name, tmp_path, num_key_value_heads=4)
    questions = [Question(prompt, count=OUTPUTS) for prompt in prompts()]
    found = ranks.run(on_rank.answer_text, str(tmp_path), questions, size=4)
    assert found == [generated(tmp_path, prompts())] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cohere", "deepseek_v3", "mixtral", "phi3", "starcoder2"])
def test_ranks_have_the_same_tokens_in_bfloat16(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Packed linear layers still sum over ranks; tokens are close to those of one rank, which rounds once."""
    make_checkpoint(name, tmp_path)
    questions = [Question(prompt, count=OUTPUTS) for prompt in prompts()]
    found = ranks.run(on_rank.answer_text, str(tmp_path), questions, "bfloat16")
    alone = on_rank.answer_text(WorkerSettings(threads=1), str(tmp_path), questions, "bfloat16")
    assert found[0] == found[1]
    firsts = [answer[0] for answer in found[0]], [answer[0] for answer in alone]
    assert sum(one == other for one, other in zip(*firsts, strict=True)) > len(questions) // 2


def inspect(path: Path) -> Any:
    return plugin.inspect(str(path), dtype="auto", item_tokens_max=0)


def built(name: str, **changes: Any) -> Any:
    options = {**COMMON, **ARCHITECTURES[name], **changes}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**options))


def share(model: Any, ranks: PlannedRanks) -> Any:
    share_by_plan(model, parallel_plan(model.config, "it"), "it", ranks)
    return model


def test_a_rank_has_its_part_of_what_the_plan_names_and_the_rest_in_full() -> None:
    layer = share(built("qwen3_moe"), PlannedRanks(ranks=2, rank=1)).model.layers[1]
    shapes = {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
    assert shapes["self_attn.q_proj.weight"] == (32, 64)
    assert shapes["self_attn.k_proj.weight"] == (16, 64)
    assert shapes["self_attn.o_proj.weight"] == (64, 32)
    assert shapes["mlp.experts.gate_up_proj"] == (4, 32, 64)
    assert shapes["mlp.experts.down_proj"] == (4, 64, 16)
    assert shapes["mlp.gate.weight"] == (4, 64)


def test_a_rank_has_the_same_half_of_gate_and_up() -> None:
    experts = (
        share(random_model("mixtral"), PlannedRanks(ranks=2, rank=1)).model.layers[0].mlp.experts
    )
    whole = random_model("mixtral").model.layers[0].mlp.experts.gate_up_proj
    inner = whole.shape[1] // 2
    wanted = torch.cat([whole[:, inner // 2 : inner], whole[:, inner + inner // 2 :]], dim=1)
    assert torch.equal(experts.gate_up_proj, wanted)


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**COMMON, **ARCHITECTURES[name]))


@pytest.mark.parametrize(("name", "shares"), [("cohere", True), ("olmo2", False)])
def test_whether_ranks_share_the_cache_follows_from_the_plan(
    tmp_path: Path, name: str, shares: bool
) -> None:
    make_checkpoint(name, tmp_path)
    assert inspect(tmp_path).shares_kv is shares
    assert shares_heads(built(name).config) is shares


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("stablelm", 2, "no plan for tensor parallelism"),
        ("qwen3_next", 2, "layers with a state"),
        ("cohere", 3, "num_attention_heads is 4, .* one of 1, 2."),
    ],
)
def test_models_that_ranks_cannot_share_are_refused_before_the_start(
    tmp_path: Path, name: str, ranks: int, message: str
) -> None:
    make_checkpoint(name, tmp_path)
    with pytest.raises(CheckpointError, match=f"{message}.*"):
        plugin.check_parallel(inspect(tmp_path), stage="generate", ranks=ranks)


def test_unknown_entry_of_a_plan_is_refused() -> None:
    config = built("cohere").config
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "sideways"}
    with pytest.raises(CheckpointError, match="entries sideways. Remedy: "):
        parallel_plan(config, "it")


def test_parameters_that_the_plan_is_silent_about_are_refused() -> None:
    """They may concern all heads, or be added by each rank."""
    model = built("cohere")
    model.model.layers[2].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(CheckpointError, match="nothing of layers.2.self_attn.sinks"):
        share(model, PlannedRanks(ranks=2, rank=0))


def test_size_that_does_not_divide_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    make_checkpoint("cohere", tmp_path, intermediate_size=97)
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    info = inspect(tmp_path)
    settings = WorkerSettings(ranks=2, rank=0, rendezvous=str(tmp_path / "group"))
    with pytest.raises(CheckpointError, match="97 entries in 1 parts, which 2 ranks cannot"):
        plugin.load_generator(info, settings, lambda _label, _fraction: None)
