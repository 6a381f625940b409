"""Fused layers against transformers' modules, in bfloat16 on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import prompts
from tests.parity.vision_checkpoints import make_vision_checkpoint
from tests.workers import driver
from tests.workers.backends.cpu.kernels.operands import draw, use_operand
from tests.workers.backends.cpu.twins import WITHIN, run_both, run_twins
from tests.workers.driver import (
    Checkpoints,
    Driver,
    Question,
    Stage,
    Stages,
    drawn_image,
    encode_jobs,
)
from tests.workers.parallel.ranks import Ranks
from tests.workers.properties import thorough
from tests.workers.test_language import mixed_questions
from vsched.types import SamplingParams
from vsched_workers.backends.cpu import products
from vsched_workers.backends.cpu.kernels.bf16 import FLOAT32
from vsched_workers.backends.cpu.kernels.sampling import argmax
from vsched_workers.backends.cpu.language_layers import FusedLanguage
from vsched_workers.backends.cpu.products import QuantizedProduct
from vsched_workers.backends.cpu.vision_layers import FusedBlock
from vsched_workers.backends.reference.image_inputs import ImageInputs
from vsched_workers.backends.reference.layers import ModuleLayers, fuse
from vsched_workers.backends.reference.whole_model import WholeModel
from vsched_workers.families.decoders import DECODERS, MIXTURES


def test_argmax_takes_the_first_of_the_largest() -> None:
    logits = draw(6, 300)
    logits[1] = -logits[1].abs() - 1  # the bits of negative numbers are in reverse order
    logits[2, [7, 9]] = 100.0
    logits[3] = -torch.inf
    logits[4, 0] = torch.inf
    logits[5] = 0.0
    found = np.empty(6, dtype=np.int32)
    argmax(logits.data_ptr(), 6, 300, found)
    assert found.tolist() == logits.argmax(-1).tolist()
    assert found[2] == 7


@pytest.mark.parametrize("chunk", [pytest.param(5, marks=pytest.mark.slow), 48, 1000])
def test_fused_layers_equal_the_modules(stages: Stages, size: str, chunk: int) -> None:
    """Decode rows, chunks and images, including deepstack: same logits except for rounding, same choice."""
    exact, fused = (stages(size, kind, "bfloat16") for kind in ("exact", "auto"))
    options = {"chunk": chunk, "seed": chunk, "preempts": 7 * (chunk > 5)}
    run_both(exact, fused, mixed_questions(), arrivals=2, **options).check()


@pytest.mark.slow
def test_fused_layers_with_experts_and_images_equal_the_modules(stages: Stages) -> None:
    """But for rounding, which changes the choice of experts in a few rows."""
    plain, fused = (stages("nano3moe", kind, "bfloat16") for kind in ("exact", "auto"))
    assert isinstance(fused.generator._layers, FusedLanguage)  # type: ignore[attr-defined]
    assert run_both(plain, fused, mixed_questions(), chunk=11, arrivals=2).apart < WITHIN


def test_layers_with_a_module_that_is_not_described_stay_as_they_are(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    decoder = DECODERS["qwen3"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path).model
    assert not fuse(model, dataclasses.replace(decoder, query_norm=""))
    assert fuse(model, decoder)


@pytest.mark.slow
def test_fused_layers_equal_the_modules_without_the_bfloat16_instructions(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with AVX2: weights are widened, and attention is float32. With images, too."""
    monkeypatch.setattr(products, "has_tiles", lambda: False)
    monkeypatch.setattr(products, "has_bf16_dot", lambda: False)
    use_operand(monkeypatch, FLOAT32)
    exact, fused = _exact_and_fused(checkpoints("tiny25"))
    assert isinstance(fused.generator._head, QuantizedProduct)  # type: ignore[attr-defined]
    run_both(exact, fused, mixed_questions(), chunk=300, seed=1, arrivals=2).check()
    _check_images(exact, fused, [(90, 60), (448, 448)])


def _exact_and_fused(checkpoint: Path) -> tuple[Stage, Stage]:
    load = functools.partial(Stage.load, checkpoint, dtype="bfloat16")
    exact, fused = load(attention="exact"), load(attention="auto")
    assert isinstance(exact.generator._layers, ModuleLayers | WholeModel)  # type: ignore[attr-defined]
    assert isinstance(fused.generator._layers, FusedLanguage)  # type: ignore[attr-defined]
    return exact, fused


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nano25", *thorough("nano3", "gemma2", "granite")])
def test_fused_layers_equal_the_modules_on_two_ranks(
    name: str, checkpoints: Checkpoints, tmp_path: Path, ranks: Ranks
) -> None:
    """Each rank merges the projections of its own heads, and the sum over ranks is the same on both.

    Also with norms after attention and MLP, and with factors.
    """
    if name.startswith("nano"):
        path, questions = checkpoints(name), mixed_questions()
    else:
        path, questions = tmp_path, [Question(prompt, count=8) for prompt in prompts()]
        make_checkpoint(name, path, initializer_range=0.1)
    first, second = ranks.run(run_twins, str(path), questions)
    assert first == second
    assert len(first) > 20


def test_packed_weights_are_no_second_copy(stages: Stages, size: str) -> None:
    """One packed weight serves as embedding and as head if the two are tied."""
    fused: Any = stages(size, "auto", "bfloat16").generator
    assert all("norm" in name or "bias" in name for name, _ in fused.module.named_parameters())
    exact = stages(size, "exact", "bfloat16").generator
    assert fused.weights_bytes < 1.3 * exact.weights_bytes


def test_profiling_run_of_first_layers_computes_every_row(stages: Stages, size: str) -> None:
    """The last layer computes only wanted rows; a profiling run without that layer must compute all."""
    generator: Any = stages(size, "auto", "bfloat16").generator
    driver = Driver(stages(size, "auto", "bfloat16"), chunk=30)
    rows: list[int] = []
    layer = generator._layers._layers[0]
    down = layer.down

    def watch(given: torch.Tensor) -> torch.Tensor:
        rows.append(len(given))
        product: torch.Tensor = down(given)
        return product

    layer.down = watch
    try:
        with generator.first_layers(1):
            driver.step([driver.start(0, mixed_questions()[1])])
    finally:
        layer.down = down
    assert rows == [30]


@pytest.mark.parametrize("sizes", [[(90, 60)], [(200, 70), (31, 150), (140, 140)]])
def test_fused_blocks_equal_the_modules(
    stages: Stages, size: str, sizes: list[tuple[int, int]]
) -> None:
    """Windows of several sizes, one or more images at once: same rows except for rounding."""
    exact, fused = (stages(size, kind, "bfloat16") for kind in ("exact", "auto"))
    assert _fused_blocks(fused)
    _check_images(exact, fused, sizes)


def _check_images(exact: Stage, fused: Stage, sizes: list[tuple[int, int]]) -> None:
    images = [drawn_image(seed, *size) for seed, size in enumerate(sizes)]
    jobs = encode_jobs(exact.preprocessor, images, last_page=driver.PAGES - 1)
    rows = []
    for stage in (exact, fused):
        shape = (driver.PAGES, driver.ROWS_A_PAGE, exact.info.embedding_row_bytes)
        arena = np.zeros(shape, dtype=np.uint8)
        stage.encoder.encode(jobs, arena)
        rows.append(torch.from_numpy(arena).view(torch.bfloat16).float())
    assert rows[0].abs().max() > 0.1
    assert (rows[0] - rows[1]).abs().max() < WITHIN * rows[0].abs().max()


def _fused_blocks(stage: Stage) -> bool:
    blocks = stage.encoder._tower.module.blocks  # type: ignore[attr-defined]
    return all(isinstance(block, FusedBlock) for block in blocks)


_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 128}
_NO_WINDOW: Mapping[str, Any] = {"sliding_window": None, "use_sliding_window": False}
_ALL = {"num_experts_per_tok": 4}
"""All experts: rounding may change a choice among them."""

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
    "experts": ("qwen3_moe", {"mlp_only_layers": [1], **_ALL}),
    "experts and windows": ("mixtral", {"sliding_window": 9, **_ALL}),
    "an expert for all rows": ("qwen2_moe", {"use_sliding_window": False, **_ALL}),
    "experts in groups": ("dots1", _ALL),
}
"""Each with the configuration options that the parity table lacks."""


def test_every_architecture_is_tried() -> None:
    assert {name for name, _ in MADE.values()} == {*DECODERS, *MIXTURES}


FURTHER = {"cwm", "vaultgemma", "ministral", "seed_oss", "mistral", "qwen2", "norms after"}
FURTHER |= {"linear frequencies", "windows in all layers", "llama3 frequencies"}
FURTHER |= {"experts and windows", "an expert for all rows", "experts in groups"}
FURTHER |= {"rotation in windows alone", "norms after, and windows", "llama with biases"}
"""With the features of others."""


@pytest.mark.parametrize(
    "made",
    [pytest.param(made, marks=[pytest.mark.thorough] if made in FURTHER else []) for made in MADE],
)
def test_fused_layers_of_decoders_equal_the_modules(made: str, tmp_path: Path) -> None:
    """Decode rows together with chunks, preempted and recomputed: same logits except for rounding, same choice.

    With the large weights of the parity checkpoints, rounding errors grow from layer to layer.
    """
    name, changes = MADE[made]
    make_checkpoint(name, tmp_path, initializer_range=0.1, **changes)
    exact, fused = _exact_and_fused(tmp_path)
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
