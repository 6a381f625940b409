"""Text models with vsched's own modules against transformers': outputs, settings, and what falls back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoConfig

from tests.parity.architectures import make_checkpoint
from tests.patience import PATIENCE_S
from tests.programs import printed_by
from tests.workers.families.test_own_modules import CAUSAL, RANK, causal, filled
from vsched.worker.contract import WorkerSettings
from vsched_workers.families import language_family
from vsched_workers.families.decoders import DECODERS, TextFamily
from vsched_workers.families.own_families import OwnText

CPU = WorkerSettings()
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {"attention_bias": True}),
]


def written(folder: Path, name: str, /, *without: str, **entries: Any) -> Path:
    """Write a small configuration as transformers writes it, with other entries and without some."""
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    AutoConfig.for_model(name, **sizes).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | entries
    kept = {key: value for key, value in config.items() if key not in without}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(("name", "entries"), SERVED)
def test_hidden_states_and_settings_equal_transformers(
    tmp_path: Path, name: str, entries: dict[str, Any]
) -> None:
    path = str(written(tmp_path, name, **entries))
    family = language_family(name, path, CPU)
    assert isinstance(family, OwnText)
    library = TextFamily(name, DECODERS[name])
    found, expected = family.model_config(path), library.model_config(path)
    for field in set(found.__dataclass_fields__) & set(expected.to_dict()) - {"rope_parameters"}:
        assert getattr(found, field) == getattr(expected, field), field
    AttentionInterface.register(CAUSAL, causal)
    for dtype in (torch.float32, torch.bfloat16):
        model, like = filled(
            family.build_language(path, CAUSAL), library.build_language(path, CAUSAL), dtype
        )
        model.attend_by(causal)
        rows = model.embed_tokens(torch.arange(40)[None])
        places = torch.randint(0, 512, (1, 40))
        states = [
            each(inputs_embeds=rows, position_ids=places, use_cache=False).last_hidden_state
            for each in (model, like)
        ]
        assert torch.equal(*states), dtype
        assert torch.equal(model.rotary_emb.inv_freq, like.rotary_emb.inv_freq)


def test_older_layout_of_a_configuration(tmp_path: Path) -> None:
    """Of Llama 3.2, in which the rotary embedding has two entries."""
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    path = written(tmp_path, "llama", "rope_parameters", rope_scaling=scaling, rope_theta=500000.0)
    family = language_family("llama", str(path), CPU)
    assert isinstance(family, OwnText)
    assert family.model_config("").rope_parameters == LLAMA3


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"num_key_value_heads": None}),
        ("mistral", {"sliding_window": 128}),
        ("qwen2", {"use_sliding_window": True}),
        ("gemma", {}),
    ],
)
def test_model_that_needs_more_has_transformers_modules(
    tmp_path: Path, name: str, entries: dict[str, Any]
) -> None:
    path = str(written(tmp_path, name, **entries))
    family = language_family(name, path, CPU)
    assert family is None or not family.own_modules


@pytest.mark.parametrize("settings", [WorkerSettings(attention="exact"), WorkerSettings("cuda:0")])
def test_exact_attention_and_gpus_have_transformers_modules(
    tmp_path: Path, settings: WorkerSettings
) -> None:
    family = language_family("llama", str(written(tmp_path, "llama")), settings)
    assert family is not None
    assert not family.own_modules


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE_S)
def test_rank_imports_no_transformers(tmp_path: Path) -> None:
    """From the inspection of the checkpoint to the largest steps."""
    make_checkpoint("llama", tmp_path)
    assert printed_by(RANK, tmp_path, limit_s=5 * PATIENCE_S) == "[]\n"
