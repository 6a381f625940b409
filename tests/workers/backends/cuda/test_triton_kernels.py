"""The Triton kernels; on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

from tests.workers.backends.paged import filled_cache, written_out
from vsched_workers.backends.cuda.attention import TritonDecode, parts_of_context

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="no GPU, and not in Triton's interpreter",
    ),
    # What torch and Triton have to say on a machine that no test ran on before is no failure of what is tested here;
    # the interpreter of Triton 3.6 warns of numpy 2.
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("processors", [1, 4, 40], ids=["one part", "few parts", "many parts"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 80), (7, 1, 128), (3, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_attention_written_out(
    processors: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Contexts in fewer tiles than parts, and in more; grouped heads; head sizes that are no power of two."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes with numpy, which has no bfloat16")
    _, step = filled_cache(
        dtype, kv_heads, head_dim, contexts=[1, 5, 64, 200], block_size=16, device=DEVICE
    )
    query = torch.randn(4, heads, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = TritonDecode(processors)(query.to(DEVICE), 1, step, 0.3)
    assert found.dtype == dtype
    differs = (found.cpu().double() - written_out(query, step, 1, 0.3)).abs().max()
    assert differs < (1e-5 if dtype == torch.float32 else 2e-2)


def test_parts_keep_all_processors_busy_and_have_a_bound() -> None:
    assert parts_of_context(2, 132) == 64
    assert parts_of_context(32, 132) == 8
    assert parts_of_context(1024, 132) == 1
