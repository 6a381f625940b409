"""The tower of any architecture, without its language model, against the whole model of transformers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity.vision_architectures import (
    VISION_ARCHITECTURES,
    images_of,
    make_model,
    save_model,
)
from vsched.errors import CheckpointError
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.reference.any_tower import AnyTower
from vsched_workers.backends.reference.backend import ReferenceBackend
from vsched_workers.checkpoint.whole_model import build_tower, load_whole

SAMPLE = ("idefics3", "internvl", "llava_onevision", "mistral3", "qwen3_omni_moe_thinker")
"""Crops in a dimension of their own or in the first one, several resolutions, any size, deepstack."""


def load_tower(path: Path, family: str) -> AnyTower:
    model = load_whole(
        build_tower(str(path), family),
        str(path),
        dtype=torch.float32,
        device="cpu",
        progress=lambda _label, _fraction: None,
    )
    return AnyTower(model, torch.float32)


@pytest.mark.parametrize("name", SAMPLE)
@torch.inference_mode()
def test_tower_alone_gives_the_rows_of_the_whole_model(tmp_path: Path, name: str) -> None:
    """To the bit, and of the right images."""
    save_model(name, tmp_path)
    alone = load_tower(tmp_path, VISION_ARCHITECTURES[name].family or name)
    whole = AnyTower(make_model(name), torch.float32)
    images = images_of(name)
    rows = [alone(image) for image in images]
    for image, found in zip(images, rows, strict=True):
        assert torch.equal(found, whole(image))
        assert found.std() > 0.5
    shapes = {tuple(found.shape) for found in rows}
    assert all(
        not torch.allclose(one, other, atol=0.1)
        for one, other in itertools.pairwise(rows)
        if one.shape == other.shape
    ), shapes


@torch.inference_mode()
def test_rows_are_the_levels_of_a_token_side_by_side() -> None:
    name = "qwen3_omni_moe_thinker"
    model = make_model(name)
    (image, *_) = images_of(name)
    out = model.get_image_features(
        torch.from_numpy(image["pixel_values"]), torch.from_numpy(image["image_grid_thw"])
    )
    levels = [out.pooler_output[0], *(level[0] for level in out.deepstack_features)]
    assert torch.equal(AnyTower(model, torch.float32)(image), torch.cat(levels, dim=-1))


def test_a_tower_holds_nothing_of_the_language_model(tmp_path: Path) -> None:
    save_model("llava", tmp_path)
    tower = build_tower(str(tmp_path), "llava")
    names = [name for name, _ in tower.named_parameters()]
    assert names
    assert all(name.startswith(("model.vision_tower.", "model.multi_modal")) for name in names)


def test_an_array_that_the_tower_does_not_ask_for_is_left_out() -> None:
    tower = AnyTower(make_model("llava"), torch.float32)
    (image, *_) = images_of("llava")
    more = {**image, "num_crops": np.array([1])}
    assert torch.equal(tower(more), tower(image))


def test_a_model_without_features_of_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kosmos-2", "image_token_id": 3}')
    with pytest.raises(CheckpointError, match="no features of images"):
        build_tower(str(tmp_path), "kosmos-2")


@pytest.mark.parametrize("name", sorted({*SAMPLE, "gemma3", "llava"}))
@torch.inference_mode()
def test_packed_weights_give_the_rows_of_those_that_are_not(name: str) -> None:
    """In bfloat16, as far as its precision goes."""
    (image, *_) = images_of(name)
    plain = AnyTower(make_model(name).to(torch.bfloat16), torch.bfloat16)(image)
    backend = ReferenceBackend(WorkerSettings(attention="exact"), torch.bfloat16)
    tower, size = backend.prepare_any_tower(make_model(name).to(torch.bfloat16))
    packed = tower(image)
    assert size > 0
    scale = plain.float().std().item()
    assert (packed.float() - plain.float()).abs().max().item() < 0.05 * scale
