"""A sample of the comparison that `python -m tests.parity` makes in full."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.parity.__main__ import BEGIN, END, PAGE, SEEING_BEGIN, SEEING_END, VIDEO_BEGIN, VIDEO_END
from tests.parity.architectures import ARCHITECTURES, FAMILY_SIZES, REFUSED, SAMPLE
from tests.parity.compare import compare, refusal_of
from tests.parity.video_compare import answers_about_pruned_video, compare_video
from tests.parity.vision_architectures import (
    VISION_ARCHITECTURES,
    VISION_REFUSED,
    VISION_SAMPLE,
    save_model,
)
from tests.parity.vision_checkpoints import WITH_VIDEO
from tests.parity.vision_compare import compare_own, compare_vision
from tests.workers.backends.cuda.on_host import CudaOnHost
from tests.workers.properties import thorough, usually
from vsched.errors import CheckpointError
from vsched_workers import language, vision
from vsched_workers.families.video_processors import VIDEO_PROCESSORS
from vsched_workers.plugin import plugin

VIDEO_SAMPLE = ("qwen2_vl", "smolvlm", "glm4v", "llava_onevision")
"""Positions in time, frames as images within a text, timestamps between groups, and a row after each video."""

CUDA_SAMPLE = ("stablelm", "gemma3_text", "qwen3_next", "deepseek_v3", "ernie4_5_vl_moe")
"""Layers of a decoder without a description, windows, states, latent attention, and images."""


@pytest.mark.parametrize("name", usually("llama", "lfm2", of=SAMPLE))
def test_answers_are_those_of_generate(name: str) -> None:
    """In one step, in chunks, after preemptions, and over the blocks of an earlier request."""
    assert not compare(name).unequal


@pytest.mark.parametrize(
    "name",
    usually("jamba", of=("bamba", "falcon_h1", "jamba", "kimi_linear", "lfm2", "qwen3_next")),
)
def test_kernels_of_recurrent_layers_generate_the_same(name: str) -> None:
    assert not compare(name, attention="auto").unequal


@pytest.mark.parametrize("name", usually("gemma3", "qwen2_vl", of=VISION_SAMPLE))
def test_answers_about_images_are_those_of_generate(name: str) -> None:
    assert not compare_vision(name).unequal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *(("qwen2_5_vl", "auto"), ("qwen3_vl", "exact"), ("qwen3_vl_moe", "exact")),
        *thorough(("qwen2_5_vl", "exact"), ("qwen3_vl", "auto")),
    ],
)
def test_answers_of_own_paths_are_those_of_generate(name: str, attention: str) -> None:
    """Chunks split images, and are mixed with decode rows; output is recomputed, too."""
    assert not compare_own(name, attention=attention).unequal


@pytest.mark.parametrize("name", usually("qwen2_vl", of=VIDEO_SAMPLE))
def test_answers_about_videos_are_those_of_generate(name: str) -> None:
    """Chunks of 7 tokens end within frame groups; the prompt is that of transformers' processor."""
    assert not compare_video(name).unequal


@pytest.mark.parametrize("name", usually("qwen2_vl", of=("qwen2_vl", "glm4v", "qwen3_5")))
def test_answers_about_pruned_videos_are_those_of_transformers_modules(name: str) -> None:
    found, expected = answers_about_pruned_video(name)
    assert found == expected


@pytest.mark.parametrize("name", usually("stablelm", of=CUDA_SAMPLE))
def test_cuda_backend_on_the_host_generates_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m tests.parity --device cuda-on-host` compares all of them."""
    for module in (language, vision):
        monkeypatch.setattr(module, "choose_backend", CudaOnHost)
    made = compare_vision if name in VISION_SAMPLE else compare
    assert not made(name).unequal


def test_features_that_cannot_be_given_to_a_model_are_reported_before_weights_are_read(
    tmp_path: Path,
) -> None:
    """Its prompts have tokens around images, which get features of their own."""
    save_model("ovis2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="features of its tower for tokens of the text"):
        plugin.inspect(str(tmp_path), dtype="float32", item_tokens_max=0)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "attention of its own"),
        ("diffllama", "attend more than once"),
        ("doge", "masks of its own"),
        ("mamba2", "no layer that attends"),
        ("zaya", "a state of a kind that is not known"),
        ("llama4_text", "temperatures"),
    ],
)
def test_unsupported_architectures_are_refused_before_weights_are_read(name: str, why: str) -> None:
    assert re.search(why, refusal_of(name))


def listed(begin: str, end: str, kind: str) -> list[str]:
    """Architectures on the page between two marks, of the rows with some first cells."""
    text = PAGE.read_text().partition(begin)[2].partition(end)[0]
    rows = re.findall(rf"^\| (?:{kind}) \| (`[^|]*) \|", text, re.MULTILINE)
    return sorted(name for row in rows for name in re.findall(r"`([^`]+)`", row))


SEEING = {*VISION_ARCHITECTURES} - {*VISION_REFUSED}
ANY = "fused|modules|generic"


@pytest.mark.parametrize(
    ("begin", "end", "kind", "names"),
    [
        (BEGIN, END, rf"(?:{ANY}) \| (?:several|one)", [*FAMILY_SIZES, *ARCHITECTURES]),
        (BEGIN, END, r"[^|`]+", REFUSED),
        (SEEING_BEGIN, SEEING_END, r"(?:fused|modules) \| one", FAMILY_SIZES),
        (SEEING_BEGIN, SEEING_END, r"generic \| one", SEEING),
        (VIDEO_BEGIN, VIDEO_END, ANY, [*FAMILY_SIZES, *WITH_VIDEO]),
    ],
    ids=["text", "refused", "own paths with images", "images", "videos"],
)
def test_page_lists_every_architecture_and_all_are_equal(
    begin: str, end: str, kind: str, names: Iterable[str]
) -> None:
    assert listed(begin, end, kind) == sorted(names), "run `python -m tests.parity`"


def test_each_architecture_with_a_video_processor_is_compared() -> None:
    described = {name for each in VIDEO_PROCESSORS.values() for name in each.families}
    assert described == set(WITH_VIDEO)
