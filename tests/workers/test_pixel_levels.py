"""Pixel values computed by ranks are bit-identical to the checkpoint's image processor, for all settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor

from tests.workers.driver import drawn_image, values_of
from vsched.worker.contract import Arrays
from vsched_workers.families.qwen_image import LEVELS, PIXELS
from vsched_workers.families.qwen_levels import PIECE_PATCHES, pixel_values
from vsched_workers.plugin import plugin

SETTINGS = {
    "as it is": {},
    "half of ImageNet": {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    "odd numbers": {"image_mean": [0.1, 0.7, 0.3], "image_std": [0.3, 0.11, 0.7]},
    "another scale": {"rescale_factor": 1 / 127.5},
    "not normalised": {"do_normalize": False},
    "not rescaled": {"do_rescale": False},
    "as bytes": {"do_rescale": False, "do_normalize": False},
}


@pytest.mark.parametrize("changed", SETTINGS.values(), ids=SETTINGS)
def test_pixel_levels_are_those_of_the_processor(
    checkpoints: Callable[[str], Path], size: str, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """All 256 values in each channel, in patches of a picture; the processor handles the picture itself."""
    shutil.copytree(checkpoints(size), tmp_path / "changed")
    file = tmp_path / "changed" / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"] |= changed
    file.write_text(json.dumps(settings))
    image = drawn_image(1, 640, 480)
    processor: Any = AutoImageProcessor.from_pretrained(file.parent, backend="pil")
    wanted = processor(image, return_tensors="np")["pixel_values"]
    info = plugin.inspect(str(file.parent), dtype="float32", item_tokens_max=0)
    made = plugin.load_preprocessor(info).process_image(image)
    assert len(np.unique(made[PIXELS])) > 200
    assert len(wanted) > PIECE_PATCHES["cpu"]
    found = values_of([made]).numpy()
    assert found.tobytes() == np.ascontiguousarray(wanted, np.float32).tobytes()
    assert 8 * made[PIXELS].nbytes == found.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pixel_values_of_a_type_are_rounded_as_the_numbers_are(dtype: torch.dtype) -> None:
    numbers = np.random.default_rng(0).normal(0, 3, (3, 256)).astype(np.float32)
    arrays: Arrays = {PIXELS: np.arange(256, dtype=np.uint8)[None].repeat(3, 1), LEVELS: numbers}
    pixels = torch.from_numpy(arrays[PIXELS])
    exact, rounded = (
        pixel_values(pixels, [arrays], each, temporal=2) for each in (torch.float32, dtype)
    )
    assert torch.equal(rounded, exact.to(dtype))


def test_pixel_values_repeat_an_image_in_time_each_by_its_own_levels() -> None:
    """Each channel with its own values, one temporal slice after the other."""
    levels = np.arange(2 * 256, dtype=np.float32).reshape(2, 256)
    pixels = np.array([[0, 1, 2, 255]], dtype=np.uint8)
    images: list[Arrays] = [{PIXELS: pixels, LEVELS: levels}, {PIXELS: pixels, LEVELS: -levels}]
    both = torch.from_numpy(np.concatenate([pixels, pixels]))
    first = [0, 1, 0, 1, 258, 511, 258, 511]
    found = pixel_values(both, images, torch.float32, temporal=2)
    assert found.tolist() == [first, [-each for each in first]]
