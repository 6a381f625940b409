"""Fused decoder-only models against transformers' modules, in bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import prompts
from tests.parity.vision_checkpoints import make_vision_checkpoint
from tests.workers.backends.cpu.twins import run_both, run_twins
from tests.workers.driver import Driver, Question, Stage, drawn_image
from tests.workers.parallel.ranks import Ranks
from tests.workers.properties import thorough
from vsched.types import SamplingParams
from vsched_workers.backends.cpu.language_layers import FusedLanguage
from vsched_workers.backends.reference.image_inputs import ImageInputs
from vsched_workers.backends.reference.layers import ModuleLayers
from vsched_workers.backends.reference.whole_model import WholeModel
from vsched_workers.families.decoders import DECODERS

_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 128}
_NO_WINDOW: Mapping[str, Any] = {"sliding_window": None, "use_sliding_window": False}

MADE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 frequencies": ("llama", {"rope_parameters": _LLAMA3}),
    "linear frequencies": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "cwm": ("cwm", {}),
    "rotation in windows alone": ("exaone4", {}),
    "vaultgemma": ("vaultgemma", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "ministral": ("ministral", {}),
    "layers that do not rotate": ("smollm3", {"sliding_window": None}),
    "weights that are merged already": (
        "phi3",
        {"sliding_window": None, "tie_word_embeddings": False},
    ),
    "windows in all layers": ("mistral", {}),
    "windows in some layers": ("qwen2", {}),
    "seed_oss": ("seed_oss", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", _NO_WINDOW),
    "qwen2": ("qwen2", _NO_WINDOW),
    "norms of one plus their weights": ("gemma", {}),
    "scores and logits that are bent": (
        "gemma2",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "frequencies by kinds of layers": ("gemma3_text", {}),
    "factors": ("granite", {}),
    "norms after": ("olmo2", {}),
    "norms after, and windows": ("olmo3", {}),
    "qwen3 with yarn": ("qwen3", {**_NO_WINDOW, "rope_parameters": _YARN}),
}
"""Each with the configuration options that the parity table lacks."""


def test_every_architecture_is_tried() -> None:
    assert {name for name, _ in MADE.values()} == {*DECODERS}


FURTHER = {"cwm", "vaultgemma", "ministral", "seed_oss", "mistral", "qwen2", "norms after"}
FURTHER |= {"linear frequencies", "windows in all layers", "llama3 frequencies"}
FURTHER |= {"rotation in windows alone", "norms after, and windows", "llama with biases"}
"""With the features of others."""


@pytest.mark.parametrize(
    "made",
    [pytest.param(made, marks=[pytest.mark.thorough] if made in FURTHER else []) for made in MADE],
)
def test_fused_layers_equal_the_modules(made: str, tmp_path: Path) -> None:
    """Decode rows together with chunks, preempted and recomputed: same logits except for rounding, same choice.

    With the large weights of the parity checkpoints, rounding errors grow from layer to layer.
    """
    name, changes = MADE[made]
    make_checkpoint(name, tmp_path, initializer_range=0.1, **changes)
    exact, fused = (
        Stage.load(tmp_path, attention=kind, dtype="bfloat16") for kind in ("exact", "auto")
    )
    assert isinstance(exact.generator._layers, ModuleLayers)  # type: ignore[attr-defined]
    assert isinstance(fused.generator._layers, FusedLanguage)  # type: ignore[attr-defined]
    questions = [Question(prompt, count=12) for prompt in prompts()]
    run_both(exact, fused, questions, chunk=11, arrivals=2, preempts=7).check()


@pytest.mark.parametrize("name", ["llava", *thorough("internvl", "mistral3", "smolvlm")])
def test_language_parts_of_vision_models_are_fused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With image embeddings at the positions where the whole model's modules put them."""
    make_vision_checkpoint(name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    smaller = {
        key: weight * 0.3 if weight.dim() == 2 else weight for key, weight in weights.items()
    }
    save_file(smaller, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fused = Stage.load(tmp_path, attention="auto", dtype="bfloat16")
    monkeypatch.setattr(ImageInputs, "only_places_rows", lambda *_: False)
    exact = Stage.load(tmp_path, attention="exact", dtype="bfloat16")
    assert isinstance(exact.generator._layers, WholeModel)  # type: ignore[attr-defined]
    assert isinstance(fused.generator._layers, FusedLanguage)  # type: ignore[attr-defined]
    questions = [
        Question(text, images=[drawn_image(seed, 60, 40) for seed in range(count)], count=12)
        for text, count in (("What is it?", 1), ("And these two?", 2), ("No image.", 0))
    ]
    run_both(exact, fused, questions, chunk=11, arrivals=2, preempts=7).check()


@pytest.mark.parametrize("name", ["gemma3", *thorough("glm4v", "paligemma")])
def test_language_parts_that_see_more_or_have_axes_stay_as_they_are(
    name: str, tmp_path: Path
) -> None:
    make_vision_checkpoint(name, tmp_path)
    stage = Stage.load(tmp_path, attention="auto", dtype="bfloat16")
    assert isinstance(stage.generator._layers, WholeModel)  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["embeddings", "positions", "logits"])
def test_a_model_that_does_more_than_place_rows_is_seen(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recognized by its values, independently of its code."""
    make_vision_checkpoint("llava", tmp_path)
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    inputs = ImageInputs(model, levels=1)
    inputs.try_out(model)
    assert inputs.only_places_rows(model)
    if what == "logits":
        monkeypatch.setattr(model, "get_output_embeddings", lambda: torch.nn.Linear(64, 300))
    else:
        name = {"embeddings": "inputs_embeds", "positions": "position_ids"}[what]
        model.model.language_model.register_forward_pre_hook(
            lambda _module, args, given: (args, given | {name: given[name] + 1}), with_kwargs=True
        )
    assert not inputs.only_places_rows(model)


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_logits_are_divided_and_bent_as_by_transformers(name: str, tmp_path: Path) -> None:
    """Greedy decoding does not show it; sampling and log-probabilities do."""
    make_checkpoint(
        name, tmp_path, **({"final_logit_softcapping": 5.0} if name == "gemma2" else {})
    )
    prompt, sampling = prompts()[0], SamplingParams(temperature=0.0, logprobs=5)
    (answer,) = Driver(Stage.load(tmp_path), chunk=1000).run([Question(prompt, (), 1, sampling)])
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        wanted = whole(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    for token, logprob in answer.logprobs[0].top:
        assert logprob == pytest.approx(float(wanted[token]), abs=1e-3)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_ranks_share_layers_with_post_norms_and_factors(
    name: str, tmp_path: Path, ranks: Ranks
) -> None:
    make_checkpoint(name, tmp_path, initializer_range=0.1)
    questions = [Question(prompt, count=8) for prompt in prompts()]
    first, second = ranks.run(run_twins, str(tmp_path), questions)
    assert first == second
    assert len(first) > 20
