"""The int8 KV cache: quantization of heads, and consistency of writes and reads."""

from __future__ import annotations

import functools

import pytest
import torch

from vsched_workers.batching.kv_cache import (
    LEVELS,
    KvCache,
    KvShape,
    from_int8,
    kept_dim,
    kept_width,
    to_int8,
)


def heads(*shape: int) -> torch.Tensor:
    """Return random heads of different magnitudes."""
    chance = torch.Generator().manual_seed(sum(shape))
    sizes = 10.0 ** torch.randint(-6, 5, (*shape[:-1], 1), generator=chance)
    return torch.randn(shape, generator=chance) * sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_head_is_half_a_level_off_at_most(dtype: torch.dtype) -> None:
    """Plus the effect of rounding the scale to bfloat16 on the largest value, and of rounding the result."""
    given = heads(40, 3, 64).to(dtype)
    kept = to_int8(given)
    assert kept.shape == (40, 3, 66)
    found = from_int8(kept, dtype)
    assert found.dtype == dtype
    largest = given.float().abs().amax(-1, keepdim=True)
    share = 1.01 / 2 / LEVELS + (2**-8 if dtype == torch.bfloat16 else 0)
    assert ((found.float() - given.float()).abs() <= largest * share).all()
    assert (found != given).any()


def test_int8_head_of_zeros_and_of_next_to_nothing_is_zeros() -> None:
    given = torch.zeros(2, 8)
    given[1] = 1e-38
    assert not from_int8(to_int8(given), torch.float32).any()


def test_int8_head_of_no_numbers_stays_one() -> None:
    """NaNs and infinities of a model are not hidden."""
    given = torch.ones(2, 8)
    given[0, 3], given[1, 5] = torch.nan, torch.inf
    assert from_int8(to_int8(given), torch.float32).isnan().any(-1).all()


def test_width_of_a_head() -> None:
    for dtype, width in ((torch.float32, 64), (torch.bfloat16, 64), (torch.int8, 66)):
        assert kept_width(64, dtype) == width
        assert kept_dim(width, dtype) == 64
    assert KvShape(2, 64, 32).kept_bytes(torch.bfloat16) == 2 * 2 * 96
    assert KvShape(2, 64, 32).kept_bytes(torch.int8) == 2 * (96 + 4)


@pytest.mark.parametrize("kept", [torch.float32, torch.int8])
def test_cache_has_what_it_says_that_it_keeps(kept: torch.dtype) -> None:
    """Keys and values of different sizes, on arbitrary slots; all else stays zero."""
    shapes = [KvShape(2, 8, 8), KvShape(3, 16, 4)]
    make = functools.partial(KvCache, shapes, blocks=5, block_size=4, allocate=torch.zeros)
    cache = make(dtype=kept)
    slots = torch.tensor([7, 0, 19, 3])
    key, value = heads(3, 4, 16), heads(3, 4, 4)
    found = cache.layers[1].put(slots, key, value)
    read = cache.layers[1].read(slots, torch.float32)
    for one, other, given in zip(found, read, (key, value), strict=True):
        assert one.shape == given.shape
        assert torch.equal(one, other.transpose(0, 1))
        assert torch.equal(one, given) == (kept == torch.float32)
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert not any(each[others].any() for each in (*cache.keys, *cache.values))
    assert not cache.keys[0].any()
    several = cache.layers[1].read(slots.view(2, 2), torch.float32)
    assert torch.equal(several[0].flatten(0, 1), read[0])
