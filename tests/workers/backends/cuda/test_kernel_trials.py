"""Trials of Triton kernels: differences, and results that are not numbers."""

from __future__ import annotations

import logging

import pytest
import torch

from vsched_workers.backends.cuda.attention_trials import WITHIN, passes


@pytest.mark.parametrize(
    ("apart", "right"),
    [
        ([0.0, WITHIN[torch.float32]], True),
        ([0.0, 2 * WITHIN[torch.float32]], False),
        ([0.0, float("nan")], False),
        ([float("nan"), 0.0], False),
    ],
)
def test_each_run_of_a_trial_must_be_right(
    apart: list[float],
    right: bool,
    caplog: pytest.LogCaptureFixture,  # a parameter
) -> None:
    """The first launch is by Triton, the second without its dispatch."""
    left = list(apart)
    with caplog.at_level(logging.WARNING):
        found = passes(
            lambda: left.pop(0), torch.float32, doing="trying", without="no tower", kernels="its"
        )
    assert found is right
    assert not left
    assert ("no tower: its are wrong by" in caplog.text) is not right
