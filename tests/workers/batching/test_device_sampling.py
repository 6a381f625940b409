"""The sampler in torch, for GPUs: here on a CPU, compared with numpy's definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.batching.special_rows import OPTIONS, special
from vsched.types import SamplingParams
from vsched_workers.batching.sampling import SpecialRow, StagedDraw, draw_in_numpy, is_foreseeable

WORDS = 5000


def logits_of(spread: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    logits = torch.from_numpy(np.random.default_rng(5).standard_normal((6, WORDS)) * spread)
    logits[:, ::7] = -torch.inf
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [0.0, 1.0, 9.0])
def test_device_sampler_equals_numpy(dtype: torch.dtype, spread: float) -> None:
    """All parameters in one batch, with ties, forbidden tokens and a mask; a row is the same alone."""
    logits = logits_of(spread, dtype)
    rows = [
        special(index % 6, SamplingParams(seed=index, **options), [1, 9], [5, 9, 9])
        for index, options in enumerate(OPTIONS.values())
    ]
    rows[2].sequence.token_mask = np.random.default_rng(1).integers(0, 2**32, 100, dtype=np.uint32)
    together = StagedDraw(rows, WORDS).run(logits).tolist()
    assert together == draw_in_numpy(logits, rows).tolist()
    assert [StagedDraw([row], WORDS).run(logits).tolist() for row in rows] == [
        [token] for token in together
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9},
        {"min_tokens": 4, "temperature": 0.0},
        {"logit_bias": ((3, 9.0),), "bad_words": ((7,),)},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.9},
        {"frequency_penalty": 30.0, "temperature": 0.0},
    ],
)
def test_draw_is_staged_before_the_last_token_is_known(options: dict[str, Any]) -> None:
    """The device adds that token; the host's placeholder is not read."""
    logits = torch.full((6, WORDS), -9.0)
    logits[:, 3:9] = torch.tensor([3.0, 2.9, 5.0, 2.7, 2.6, 2.5])
    rows = [
        special(row, SamplingParams(seed=row, **options), [1, 9], [5, 9, 5], frozenset({5}))
        for row in range(6)
    ]
    expected = draw_in_numpy(logits, rows).tolist()
    last = torch.tensor([5] * 6, dtype=torch.int32)
    for entry in rows:
        entry.sequence.tokens[entry.position - 1] = 4
    staged = StagedDraw(rows, WORDS, ahead=True)
    for entry in rows:
        entry.sequence.tokens[:] = 8  # after staging, the host's changes do not matter
    assert staged.run(logits, last).tolist() == expected


@pytest.mark.parametrize(
    ("options", "foreseeable"),
    [
        ({}, True),
        ({"presence_penalty": 1.0, "min_tokens": 3, "bad_words": ((4,),)}, True),
        ({"bad_words": ((4, 5),)}, False),
        ({"logprobs": 0}, False),
    ],
)
def test_features_that_need_the_last_token_on_the_host(
    options: dict[str, Any], foreseeable: bool
) -> None:
    sequence = special(0, SamplingParams(**options)).sequence
    assert is_foreseeable(sequence) == foreseeable
    sequence.token_mask = np.ones(1, np.uint32)
    assert not is_foreseeable(sequence)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_told_of_their_row(value: float) -> None:
    logits = torch.zeros(2, WORDS)
    logits[1, 3] = value
    rows: list[SpecialRow] = [special(row, SamplingParams(top_p=0.9)) for row in range(2)]
    staged = StagedDraw(rows, WORDS)
    drawn = staged.run(logits).numpy()
    assert drawn[0] >= 0
    with pytest.raises(FloatingPointError, match="no finite number"):
        staged.check(drawn)
