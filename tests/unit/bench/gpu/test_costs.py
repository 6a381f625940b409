"""Lower bounds of step times: counts match the models, and one case is written out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu.costs import SHAPES

torch = pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_counts_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """Transformers builds it, without weights."""
    from torch import nn

    from vsched_workers.batching import paged_attention
    from vsched_workers.families import FAMILIES

    def linears(module: Any) -> int:
        return sum(each.weight.numel() for each in module.modules() if isinstance(each, nn.Linear))

    shape = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape.config()))
    paged_attention.register()
    family = FAMILIES["qwen2_5_vl"]
    with torch.device("meta"):
        model = family.build_language(str(tmp_path), paged_attention.NAME)
        tower = family.build_vision(str(tmp_path), "sdpa")
    assert linears(model) == shape.language_linears
    assert linears(tower.merger) == shape.merger_linears
    assert linears(tower) == shape.vision_linears + shape.merger_linears


def test_decode_of_the_3b_shape_is_as_written_out() -> None:
    """3.09 G weights of two bytes and 36,864 bytes a token; two operations a weight, four a value of a key."""
    cost = SHAPES["3b"].decode(8, 1024)
    weights = 36 * (2 * 2048**2 + 2 * 2048 * 256 + 3 * 2048 * 11008) + 2048 * 151936
    assert cost.moved == 2 * weights + 8 * 1024 * 36_864
    assert cost.operations == 8 * (2 * weights + 4 * 36 * 2048 * 1024)
