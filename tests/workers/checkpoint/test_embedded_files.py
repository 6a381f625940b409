"""Embeddings sent by clients, written by both safetensors libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from tests.parity.vision_checkpoints import make_vision_checkpoint
from tests.workers.driver import Stage
from vsched.errors import RequestRefused
from vsched.media.embeddings import read_embedding
from vsched.worker.contract import ImagePlan
from vsched_workers.families.qwen_image import grid_of
from vsched_workers.plugin import plugin


def test_brought_rows_may_come_from_numpy_or_torch(stages: Callable[..., Stage]) -> None:
    """Features may be numpy arrays or tensors: the files and the results are the same."""
    stage = stages("nano25")
    width = stage.info.hidden_size * stage.info.embedding_levels
    rows = np.random.default_rng(1).normal(size=(6, width)).astype(np.float32)
    grid = np.array([1, 4, 6], dtype=np.int64)
    files = [
        safetensors.numpy.save({"embeds": rows, "grid_thw": grid}),
        safetensors.torch.save(
            {"embeds": torch.from_numpy(rows), "grid_thw": torch.from_numpy(grid)}
        ),
    ]
    front = stage.preprocessor
    assert front.companion is not None
    read = [
        read_embedding(file, stage.info, front.companion, front.plan_embedding) for file in files
    ]
    assert [(grid_of(plan.metadata), plan.tokens) for _, plan in read] == [((1, 4, 6), 6)] * 2
    assert bytes(read[0][0].data) == bytes(read[1][0].data) == rows.tobytes()


def test_missing_offsets_are_computed(stages: Callable[..., Stage]) -> None:
    """A client sends no offsets: they are the positions of the placeholders, in text and in token ids."""
    stage = stages("nano25")
    mark = stage.info.placeholder
    plans = [ImagePlan((), 3), ImagePlan((), 2)]
    ids, spans = stage.preprocessor.expand([7, mark, 8, 9, mark], plans)
    assert ids == [7, mark, mark, mark, 8, 9, mark, mark]
    assert spans == [((1, 4),), ((6, 8),)]


@pytest.mark.parametrize("name", ["llava", "llava_onevision", "internvl"])
def test_brought_rows_are_planned_by_the_size_of_their_image(name: str, tmp_path: Path) -> None:
    """For an architecture without a grid: the plan equals that for the image itself."""
    make_vision_checkpoint(name, tmp_path, weights=False)
    info = plugin.inspect(str(tmp_path), dtype="auto", item_tokens_max=0)
    front = plugin.load_preprocessor(info)
    assert front.companion is not None
    plan = front.plan_image(90, 30)
    width = info.hidden_size * info.embedding_levels
    rows = np.ones((plan.tokens, width), np.float32)

    def read(size: tuple[int, int]) -> ImagePlan:
        file = safetensors.numpy.save({"embeds": rows, "image_size": np.array(size)})
        assert front.companion is not None
        return read_embedding(file, info, front.companion, front.plan_embedding)[1]

    assert read((30, 90)) == plan
    for size, code in (
        ((30, -90), "image_empty"),
        ((1 << 20, 1 << 20), "image_size_exceeded"),
        ((1 << 62, 1 << 62), "image_size_exceeded"),
    ):
        with pytest.raises(RequestRefused, match="Remedy: ") as caught:
            read(size)
        assert caught.value.code == code
