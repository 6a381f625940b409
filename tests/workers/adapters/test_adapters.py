"""Adapters saved by PEFT: the same tokens as PEFT's own, mixed in one pass; unsupported features are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from vsched.errors import CheckpointError
from vsched_workers.adapters.files import read_adapter
from vsched_workers.adapters.layers import AdaptedModule

# PEFT uses an attribute that transformers 6 removes.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TOKENS = 6
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION = ["q_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 24, "target_modules": ATTENTION},
    "rslora": {"r": 8, "lora_alpha": 24, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 64},
    },
}


def base_model() -> Any:
    """Return the same small model each time, in float32."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 128,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config: Any = LlamaConfig(**sizes, **heads, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of PEFT adapters by name, all of them effective."""
    root = tmp_path_factory.mktemp("adapters")
    for name, settings in ADAPTERS.items():
        model = peft.get_peft_model(base_model(), peft.LoraConfig(**settings))
        with torch.no_grad():
            for key, tensor in model.named_parameters():
                if "lora_" in key:
                    tensor.normal_(std=0.2)
        model.save_pretrained(str(root / name))
    return root


@torch.inference_mode()
def greedy(model: Any, prompts: torch.Tensor) -> tuple[list[list[int]], torch.Tensor]:
    """Return the greedy tokens for prompts [prompts, tokens], and the logits of the last pass."""
    for _ in range(TOKENS):
        logits = model(input_ids=prompts, use_cache=False).logits
        prompts = torch.cat([prompts, logits[:, -1:].argmax(-1)], 1)
    return prompts[:, -TOKENS:].tolist(), logits[:, -1]


@torch.inference_mode()
def adapted(
    model: Any, module: AdaptedModule, prompts: torch.Tensor, names: Sequence[str | None]
) -> tuple[list[list[int]], torch.Tensor]:
    """Do the same with an adapter for each prompt."""
    for _ in range(TOKENS):
        rows = [name for name in names for _ in range(prompts.shape[1])]
        with module.rows(rows):
            logits = model(input_ids=prompts, use_cache=False).logits
        prompts = torch.cat([prompts, logits[:, -1:].argmax(-1)], 1)
    return prompts[:, -TOKENS:].tolist(), logits[:, -1]


def prompts_of(count: int) -> torch.Tensor:
    return torch.randint(0, 128, (count, 5), generator=torch.Generator().manual_seed(3))


def serve(saved: Path, names: Sequence[str], count_max: int = 8) -> tuple[Any, AdaptedModule]:
    model = base_model()
    module = AdaptedModule(model, count_max=count_max, rank_max=8)
    for name in names:
        module.add(name, read_adapter(saved / name, rank_max=8))
    return model, module


def test_rows_of_different_adapters_answer_in_one_pass_as_peft_answers_each(saved: Path) -> None:
    names = [None, "rslora", "plain", None, "patterns", "plain"]
    prompts = prompts_of(1).repeat(len(names), 1)
    tokens, logits = adapted(*serve(saved, [*ADAPTERS]), prompts, names)
    for row, name in enumerate(names):
        model = base_model()
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, str(saved / name))
        expected, expected_logits = greedy(model, prompts[:1])
        assert tokens[row] == expected[0], name
        torch.testing.assert_close(logits[row], expected_logits[0], rtol=1e-4, atol=1e-4)
    assert len({tuple(each) for each in tokens}) == 4, "each adapter changes the answer"


def test_too_many_adapters_equal_names_and_high_ranks_are_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the rank of model.*: value 8, limit 4. Remedy: "):
        read_adapter(saved / "rslora", rank_max=4)
    _, module = serve(saved, ["plain"], count_max=2)
    other = read_adapter(saved / "rslora", rank_max=8)
    with pytest.raises(CheckpointError, match="there is an adapter 'plain'"):
        module.add("plain", other)
    module.add("other", other)
    with pytest.raises(CheckpointError, match="adapters: value 3, limit 2. Remedy: remove one"):
        module.add("third", other)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("peft_type", "IA3"),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("fan_in_fan_out", True),
        ("a_field_of_tomorrow", {"strength": 2}),
    ],
)
def test_unsupported_fields_that_change_the_output_are_refused_by_name(
    saved: Path, tmp_path: Path, field: str, value: Any
) -> None:
    folder = spoilt(saved, tmp_path, **{field: value})
    with pytest.raises(CheckpointError, match=rf"{field} is .*not served. Remedy: "):
        read_adapter(folder, rank_max=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": "much"}, "lora_alpha and alpha_pattern give no number"),
        ({"lora_alpha": 10**400}, "lora_alpha and alpha_pattern give no number"),
        ({"lora_alpha": 1e999}, "lora_alpha of .* is inf"),
        ({"alpha_pattern": {"(": 2}}, "lora_alpha and alpha_pattern give no number"),
    ],
)
def test_a_scaling_that_is_no_number_is_refused(
    saved: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_adapter(spoilt(saved, tmp_path, **change), rank_max=8)


def spoilt(saved: Path, folder: Path, **config: Any) -> Path:
    """Return a copy of an adapter with other fields."""
    fields = json.loads((saved / "plain" / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**fields, **config}))
    (folder / WEIGHTS).write_bytes((saved / "plain" / WEIGHTS).read_bytes())
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "is empty"),
        ({f"{Q}.lora_A.weight": (2, 32)}, "only one of lora_A and lora_B"),
        ({f"{Q}.lora_A.weight": (2, 32), f"{Q}.lora_B.weight": (32, 3)}, "make no product"),
        ({f"{Q}.lora_magnitude_vector": (32,)}, "no low-rank part of a linear layer"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (2, 128)}, "no low-rank part"),
    ],
)
def test_tensors_that_are_no_pairs_are_refused(
    saved: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    spoilt(saved, tmp_path)
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path, rank_max=8)


def test_missing_and_corrupt_files_are_reported_without_paths(saved: Path, tmp_path: Path) -> None:
    spoilt(saved, tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match=f"^{WEIGHTS} is corrupt"):
        read_adapter(tmp_path, rank_max=8)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"^{WEIGHTS} is missing; pickled"):
        read_adapter(tmp_path, rank_max=8)
    (tmp_path / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=f"^{CONFIG} is missing"):
        read_adapter(tmp_path, rank_max=8)
    with pytest.raises(CheckpointError, match="^adapter 'none' is no directory"):
        read_adapter(tmp_path / "none", rank_max=8)


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        ("model.layers.7.self_attn.q_proj", (32, 32), "which the model lacks"),
        ("model.layers.1.self_attn.q_proj", (16, 32), r"has \[32, 16\] inputs and outputs"),
        ("model.embed_tokens", (32, 32), "a Embedding here"),
    ],
)
def test_an_adapter_that_does_not_fit_changes_nothing(
    saved: Path, tmp_path: Path, module: str, shape: tuple[int, int], message: str
) -> None:
    spoilt(saved, tmp_path)
    names = [Q.removeprefix("base_model.model."), module]
    tensors = {}
    for name, outputs in zip(names, (32, shape[0]), strict=True):
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(2, shape[1])
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(outputs, 2)
    save_file(tensors, tmp_path / WEIGHTS)
    model, adapted_module = serve(saved, [])
    with pytest.raises(CheckpointError, match=message):
        adapted_module.add("other", read_adapter(tmp_path, rank_max=8))
    assert not adapted_module.names
    assert not any(child._forward_hooks for child in model.modules())
