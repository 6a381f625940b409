"""Pixel values computed by ranks, and plans of videos, as by transformers' processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from tests.each_case import each_case
from tests.workers.driver import Checkpoints, drawn_image, inspect, values_of
from tests.workers.edited import copy_of, write
from vsched.errors import RequestRefused
from vsched.worker.contract import Arrays, FrameSize, VideoFacts, VideoSampling
from vsched_workers.checkpoint.preprocess.video_rules import (
    VideoLayout,
    VideoRules,
    video_levels,
    video_rules,
)
from vsched_workers.families.qwen_image import LEVELS, PIXELS
from vsched_workers.families.qwen_levels import PIECE_PATCHES, pixel_values
from vsched_workers.families.video_processors import DEFAULTS, VIDEO_PROCESSORS
from vsched_workers.plugin import plugin

SETTINGS = {
    "half of ImageNet": {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    "odd numbers": {"image_mean": [0.1, 0.7, 0.3], "image_std": [0.3, 0.11, 0.7]},
    "another scale": {"rescale_factor": 1 / 127.5},
    "not normalised": {"do_normalize": False},
    "not rescaled": {"do_rescale": False},
    "as bytes": {"do_rescale": False, "do_normalize": False},
}


@pytest.mark.parametrize("changed", SETTINGS.values(), ids=SETTINGS)
def test_pixel_levels_are_those_of_the_processor(
    checkpoints: Checkpoints, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """All 256 values in each channel, in patches of a picture; the processor handles the picture itself."""
    path = copy_of(checkpoints("nano25"), tmp_path)
    write(path / "processor_config.json", {"image_processor": changed})
    image = drawn_image(1, 640, 480)
    processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil")
    wanted = processor(image, return_tensors="np")["pixel_values"]
    made = plugin.load_preprocessor(inspect(path)).process_image(image)
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


def rules_of(name: str, **stated: Any) -> VideoRules:
    """Return the rules of a class of video processors, with stated settings."""
    processor = VIDEO_PROCESSORS[f"{name}VideoProcessor"]
    return video_rules(processor, {**DEFAULTS, **processor.defaults, **stated})


QWEN25 = rules_of("Qwen2VL")
QWEN3 = rules_of("Qwen3VL", size={"shortest_edge": 4096, "longest_edge": 25165824})
FACTS = VideoFacts(640, 360, 40, 8.0)


def layout(
    rules: VideoRules,
    facts: VideoFacts = FACTS,
    *,
    frames_max: int = 768,
    sample: bool = True,
    tokens: int = 0,
    **options: Any,
) -> VideoLayout:
    sampling = msgspec.convert(options, VideoSampling)
    return rules.layout(facts, sampling, frames_max=frames_max, sample=sample, tokens=tokens)


SMOLVLM, GLM4V, INTERNVL = (rules_of(name) for name in ("SmolVLM", "Glm4v", "InternVL"))


@each_case(
    ("rules", "options", "frames"),
    [
        # Equal steps from the first frame on, and an even number of frames
        (QWEN25, {}, range(0, 40, 4)),
        (QWEN25, {"fps": 1.5}, [0, 6, 13, 20, 26, 33]),
        (QWEN25, {"num_frames": 5}, [0, 10, 20, 30]),
        # From the first to the last frame
        (QWEN3, {}, [0, 4, 9, 13, 17, 22, 26, 30, 35, 39]),
        (QWEN3, {"num_frames": 5}, [0, 10, 20, 29, 39, 39]),
        # Middles or beginnings of equal parts, and each interval
        (INTERNVL, {"num_frames": 4}, [5, 15, 25, 35]),
        (INTERNVL, {"fps": 0.5}, [10, 30]),
        (rules_of("LlavaOnevision"), {"num_frames": 4}, [0, 10, 20, 30]),
        (SMOLVLM, {}, [0, 9, 19, 29, 39]),
        (GLM4V, {"fps": 1}, [0, 8, 16, 24, 32, 32]),
        (GLM4V, {"max_frames": 4}, [0, 12, 24, 36]),
    ],
)
def test_frames_of_a_video(
    rules: VideoRules, options: dict[str, Any], frames: Sequence[int]
) -> None:
    assert list(layout(rules, **options).frames) == list(frames)


def test_times_of_frames() -> None:
    """Seconds per group, or the mean of the first and the last frame of each."""
    assert layout(QWEN25).interval == 1.0
    assert layout(QWEN3).times == (0.25, 1.375, 2.4375, 3.5, 4.625)
    assert layout(QWEN3, num_frames=5).times[-1] == 39 / 8


def test_a_long_video_loses_its_first_and_last_second() -> None:
    """As in SmolVLM's video processor; GLM-4V's takes fewer frames per second of one."""
    found = layout(SMOLVLM, VideoFacts(640, 360, 1000, 10.0)).frames
    assert (len(found), found[0], found[-1]) == (64, 10, 990)
    found = layout(GLM4V, VideoFacts(640, 360, 12_000, 20.0)).frames
    assert (len(found), found[1], found[-1]) == (600, 21, 11_999)
    assert layout(GLM4V, VideoFacts(640, 360, 12_000, 20.0), fps=0.001).frames == (0, 0)


def test_fixed_sizes_of_frames() -> None:
    """SmolVLM resizes twice, LLaVA-NeXT-Video crops the middle."""
    assert SMOLVLM.steps(640, 360) == (FrameSize(1456, 820), FrameSize(364, 364))
    assert layout(SMOLVLM).size == FrameSize(364, 364)
    wide = Image.new("RGB", (448, 224))
    wide.paste((255, 255, 255), (112, 0, 336, 224))
    assert (rules_of("LlavaNextVideo").resize_frame(wide) == 255).all()


@each_case("rules", [QWEN25, QWEN3])
def test_numbers_of_frames_are_bounded(rules: VideoRules) -> None:
    """By the checkpoint, the request, the server and the video."""
    long, one = VideoFacts(640, 360, 100_000, 8.0), VideoFacts(640, 360, 1, 8.0)
    counts = [
        len(layout(rules, facts, frames_max=frames_max, **options).frames)
        for facts, frames_max, options in (
            (FACTS, 768, {"fps": 0.1}),  # at least 4
            (FACTS, 768, {"fps": 0.1, "max_frames": 2}),
            (FACTS, 6, {"fps": 8}),
            (FACTS, 768, {"fps": 1000}),
            (one, 768, {}),
            (long, 1000, {"fps": 8}),
        )
    ]
    assert counts == [4, 2, 6, 40, 2, 768]
    assert len(layout(INTERNVL).frames) == 32, "if neither number nor rate is stated"


def test_frames_that_were_sampled_are_all_used() -> None:
    """Their rate is the request's, or that of the checkpoint."""
    found = layout(QWEN25, VideoFacts(640, 360, 7, 0.0), sample=False)
    assert found.frames == (0, 1, 2, 3, 4, 5, 6, 6)
    assert found.interval == 1.0
    assert layout(QWEN25, VideoFacts(640, 360, 7, 0.5), sample=False).interval == 4.0


def test_sizes_of_frames() -> None:
    """Bounds are those of a frame or, with timestamps, of all frames; a group is within the budget of an image."""
    assert layout(QWEN25).size == FrameSize(644, 364)
    assert layout(QWEN25, bounds={"max_pixels": 200_704}).size == FrameSize(588, 336)
    assert layout(QWEN25, tokens=64).size == FrameSize(280, 168)
    assert layout(QWEN3).size == FrameSize(640, 352)
    long = layout(QWEN3, VideoFacts(640, 360, 512, 2.0))
    assert (len(long.frames), long.size) == (512, FrameSize(288, 160))
    few = layout(QWEN3, tokens=40).size
    assert few.width * few.height <= 40 * 32 * 32
    capped = layout(replace(QWEN25, tokens_capped=4096), VideoFacts(1920, 1080, 128, 2.0))
    assert capped.size.width * capped.size.height <= int(128 * 28 * 28 * 1.05)


@each_case(
    ("rules", "facts", "options", "message"),
    [
        (QWEN25, FACTS, {"fps": 2, "num_frames": 4}, "Remedy: "),
        (QWEN25, FACTS, {"num_frames": 800}, "Remedy: "),
        (QWEN25, FACTS, {"max_frames": 800}, "Remedy: "),
        (QWEN25, FACTS, {"bounds": {"min_pixels": 10**7}}, "Remedy: "),
        (QWEN25, FACTS, {"bounds": {"max_pixels": 2**40}}, "Remedy: "),
        (SMOLVLM, FACTS, {"bounds": {"max_pixels": 900}}, "not resized between"),
        (QWEN3, VideoFacts(2048, 2, 4, 1.0), {}, "limit 200"),
    ],
)
def test_options_out_of_bounds_and_thin_videos_are_refused(
    rules: VideoRules, facts: VideoFacts, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        layout(rules, facts, **options)


def test_levels_are_fused_as_in_the_video_processor() -> None:
    """(value - 255 mean) / (255 deviation)."""
    settings = {"image_mean": [0.5], "image_std": [0.25], "do_rescale": True, "do_normalize": True}
    [levels] = video_levels({**settings, "rescale_factor": 1 / 255})
    assert levels[0] == -2.0
    assert levels[255] == 2.0
