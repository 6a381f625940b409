"""The torch sampler that the benchmark compares with implements top-k and top-p."""

from __future__ import annotations

import torch

from tests.bench.parts.sampler.measure import draw_logits
from tests.bench.torch_sampler import cut, make_torch_sampler


def test_torch_sampler_cuts_what_top_k_and_top_p_name() -> None:
    values = torch.tensor([[0.1, 0.5, 0.3, 0.1]]).log()
    assert cut(values.clone(), 0, 1.0).isfinite().tolist() == [[True] * 4]
    assert cut(values.clone(), 2, 1.0).isfinite().tolist() == [[False, True, True, False]]
    assert cut(values.clone(), 0, 0.7).isfinite().tolist() == [[False, True, True, False]]
    assert cut(values.clone(), 0, 0.4).isfinite().tolist() == [[False, True, False, False]]


def test_torch_sampler_is_greedy_without_special_rows() -> None:
    logits = draw_logits("flat", 3, 50)
    expected = torch.from_numpy(logits).bfloat16().argmax(dim=-1).tolist()
    assert make_torch_sampler(logits)([]).tolist() == expected
