"""GGUF blocks: the same dequantized values as from the `gguf` package."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vsched_workers.checkpoint.gguf import READERS, dequantized, read_blocks

gguf: Any = pytest.importorskip("gguf")

HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}
GROUPS = {"Q6_K": 16}


@pytest.mark.parametrize("name", READERS)
def test_blocks_stand_for_what_gguf_makes_of_them(name: str) -> None:
    """Random bytes, so that every bit matters; scales are random numbers of both signs."""
    kind = gguf.GGMLQuantizationType[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    assert size == READERS[name][0]
    chance = np.random.default_rng(0)
    blocks = chance.integers(0, 256, (6, 3, size), dtype=np.uint8)
    for start in HALVES[name]:
        drawn = chance.standard_normal((6, 3, 1)).astype(np.float16)
        blocks[..., start : start + 2] = drawn.view(np.uint8)
    rows = blocks.reshape(6, -1)
    wanted = gguf.dequantize(rows, kind)
    found = read_blocks(name, rows)
    assert found.values.shape == wanted.shape == (6, 3 * values)
    assert found.scales.shape == (6, 3 * values // GROUPS.get(name, 32))
    assert found.values.dtype == (np.uint8 if name.startswith("Q4") else np.int8)
    if found.offsets is None:
        np.testing.assert_allclose(dequantized(found), wanted, rtol=3e-7, atol=0)
    else:
        np.testing.assert_allclose(
            dequantized(found), wanted, rtol=0, atol=3e-6 * np.abs(wanted).max()
        )
