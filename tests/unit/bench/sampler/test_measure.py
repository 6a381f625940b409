"""`python -m tests.bench.parts sampler` measures every case, and only rows with sampling parameters are special."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.bench.parts.sampler.measure import ASKED, KINDS, draw_logits, measure_sampler
from vsched.worker.contract import SequenceState


def test_sampler_cases_reach_the_sampler() -> None:
    requested: list[list[int]] = []
    shapes: list[tuple[int, ...]] = []

    def make(logits: npt.NDArray[np.float32]) -> object:
        shapes.append(logits.shape)

        def choose(special: Sequence[tuple[int, SequenceState]]) -> npt.NDArray[np.int32]:
            requested.append([row for row, _ in special])
            return np.zeros(len(logits), np.int32)

        return choose

    found = measure_sampler(make, vocabulary=50, rows=(1, 3), repeats=2)  # type: ignore[arg-type]
    assert shapes == [(1, 50), (3, 50)] * len(KINDS)
    assert len(found) == len(KINDS) * 2 * len(ASKED)
    assert len(requested) == 3 * len(found)
    greedy = len(ASKED)
    assert requested[:greedy] == [[], *([[0]] * (greedy - 1))]
    assert all(row.spread_ms[0] <= row.step_ms <= row.spread_ms[1] for row in found)


def test_sampler_logits_of_a_trained_model_have_their_mass_on_few_tokens() -> None:
    for kind, least, most in (("trained", 1, 60), ("flat", 2_000, 20_000)):
        weights = np.sort(np.exp(draw_logits(kind, 1, 20_000)[0].astype(np.float64)))[::-1]
        kept = int(np.searchsorted(np.cumsum(weights), 0.95 * weights.sum())) + 1
        assert least <= kept <= most
