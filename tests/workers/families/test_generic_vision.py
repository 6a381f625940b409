"""Properties of vision-language models on the generic path, and an image's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from vsched.errors import CheckpointError
from vsched_workers.families.generic import (
    METADATA_VALUES,
    pack_metadata,
    takes_images,
    unpack_metadata,
    vision_facts,
)


def write_config(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_facts_of_a_model_report_its_placeholder_and_its_language_model(tmp_path: Path) -> None:
    text = {"model_type": "llama", "hidden_size": 64}
    path = write_config(tmp_path, model_type="llava", image_token_index=77, text_config=text)
    facts = vision_facts(path, "llava")
    assert (facts.image_token_id, facts.embedding_levels) == (77, 1)
    assert (facts.text.model_type, facts.text.hidden_size) == ("llama", 64)


def test_facts_count_a_level_for_each_deepstack_layer(tmp_path: Path) -> None:
    vision = {"deepstack_visual_indexes": [0, 2]}
    path = write_config(tmp_path, model_type="qwen3_vl", image_token_id=7, vision_config=vision)
    assert vision_facts(path, "qwen3_vl").embedding_levels == 3


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mllama"}, "attend to images apart from the text"),
        ({"model_type": "florence2"}, "an encoder for text"),
        (
            {"model_type": "llava", "text_config": {"model_type": "deepseek_v32"}},
            "indexed_attention",
        ),
        ({"model_type": "llama4"}, "temperatures"),
        ({"model_type": "perception_lm", "image_token_id": 3}, "package timm"),
    ],
)
def test_unsupported_configurations_are_refused_with_the_reason(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    family = config["model_type"]
    with pytest.raises(CheckpointError, match=f"'{family}' has .*{reason}"):
        vision_facts(write_config(tmp_path, **config), family)


def test_takes_images_follows_the_tables_of_transformers() -> None:
    assert takes_images("llava")
    assert not takes_images("llama")


def test_metadata_is_the_small_integer_arrays() -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "pixel_values": np.zeros((2, 3), np.float32),
        "image_grid_thw": np.array([[1, 8, 12]], np.int64),
        "pixel_attention_mask": np.ones((1, METADATA_VALUES + 1), np.int64),
    }
    packed = pack_metadata(arrays)
    assert len(packed) < 1024
    found = unpack_metadata(packed)
    assert list(found) == ["image_grid_thw"]
    assert found["image_grid_thw"].dtype == np.int64
    assert found["image_grid_thw"].tolist() == [[1, 8, 12]]


def test_metadata_that_is_none_is_an_error() -> None:
    with pytest.raises(msgspec.DecodeError):
        unpack_metadata(b"\xc1")
