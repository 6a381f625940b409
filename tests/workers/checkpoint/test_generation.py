"""Stop tokens and default sampling parameters in the files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vsched.errors import CheckpointError
from vsched.types import SamplingDefaults
from vsched_workers.checkpoint.facts import sampling_defaults, stop_token_ids


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 1}, (7, 9)),
        ({"eos_token_id": 7}, {"eos_token_id": 1}, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": 1}, (1,)),
        ({}, {"text_config": {"eos_token_id": [1, 2]}}, (1, 2)),
        ({}, {}, ()),
    ],
)
def test_stop_tokens_for_generation_win_over_the_models(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert stop_token_ids(write(tmp_path, generation_config=generation), config) == ids


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "<|im_end|>", "added_tokens_decoder": {"5": {"content": "<|im_end|>"}}},
        {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": {"5": "<|im_end|>"}},
        {"eos_token": "<|im_end|>"},
    ],
)
def test_stop_tokens_have_the_tokenizers_own(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A chat model ends its turns even if its generation settings only have the end of a document."""
    added = [{"id": 3, "content": "<s>"}, {"id": 5, "content": "<|im_end|>"}]
    write(tmp_path, tokenizer_config=settings, tokenizer={"added_tokens": added, "model": {}})
    write(tmp_path, generation_config={"eos_token_id": 2})
    assert stop_token_ids(tmp_path, {}) == (2, 5)
    write(tmp_path, generation_config={"eos_token_id": [5, 2]})
    assert stop_token_ids(tmp_path, {}) == (5, 2)


def test_sampling_defaults_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingDefaults()
    stated: dict[str, Any] = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }
    found = sampling_defaults(
        write(tmp_path, generation_config={**stated, "do_sample": False, "max_new_tokens": 9})
    )
    assert found == SamplingDefaults(**stated)


@pytest.mark.parametrize(
    ("stated", "meant"),
    [
        ({"top_k": -1}, SamplingDefaults()),
        ({"top_k": None, "temperature": None}, SamplingDefaults()),
        ({"temperature": 0}, SamplingDefaults(temperature=0)),
        ({"top_p": 0.0}, SamplingDefaults(top_k=1)),
    ],
)
def test_sampling_defaults_take_other_spellings(
    tmp_path: Path, stated: dict[str, Any], meant: SamplingDefaults
) -> None:
    assert sampling_defaults(write(tmp_path, generation_config=stated)) == meant


@pytest.mark.parametrize(
    "stated", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": 2.5}, {"min_p": True}]
)
def test_sampling_defaults_out_of_bounds_are_refused(
    tmp_path: Path, stated: dict[str, Any]
) -> None:
    (name,) = stated
    with pytest.raises(CheckpointError, match=rf"{name} is out of bounds: value .* Remedy"):
        sampling_defaults(write(tmp_path, generation_config=stated))
