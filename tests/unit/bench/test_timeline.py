"""Requests/s while neighbours come and go: the load, intervals, and the table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator
from typing import cast

import pytest

from tests.bench import options, timeline
from vsched.bench.load.client import BenchClient, Sample
from vsched.errors import ConfigError

SECONDS = (10, 20, 15)


def parsed(*words: str) -> argparse.Namespace:
    line = ["timeline", "--out", "o", "--peers", "p", "--clients", "2", *words]
    return options.make_parser().parse_args(line)


def rates(before: float, beside: float, after: float, *, late: int = 0) -> list[float]:
    """Return intervals of half a second; the last stretch begins late by some."""
    return [before] * 20 + [beside] * (40 + late) + [after] * (30 - late)


def test_rates_count_each_piece_as_its_share_of_a_request() -> None:
    pieces = [(-0.1, 0.5), (0.0, 0.5), (0.4, 0.5), (0.5, 1.0), (1.9, 0.25), (2.0, 1.0)]
    assert timeline.rates_of(pieces, 2) == [2.0, 2.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("after", "late", "expected"), [(10.0, 0, 0.0), (9.6, 3, 1.5), (9.0, 0, None)]
)
def test_rate_is_back_when_it_holds_95_percent(
    after: float, late: int, expected: float | None
) -> None:
    assert timeline.back_s(rates(10.0, 4.0, after, late=late), SECONDS) == expected


class InstantClient:
    """Replies at once, or after a moment, with the requested number of tokens as pieces."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def chat_when_ready(self, body: bytes) -> Sample:
        await asyncio.sleep(0)
        self.lengths.append(int(body))
        return Sample(0.0, 0.0, [0.0] * int(body), output_tokens=int(body))


def run_load(client: InstantClient, monkeypatch: pytest.MonkeyPatch, sessions: int) -> list[int]:
    """Return the numbers of neighbours over time."""
    came = []

    @contextlib.contextmanager
    def beside(count: int) -> Iterator[list[int]]:
        came.append(count)
        yield []

    monkeypatch.setattr(timeline, "neighbours", beside)
    monkeypatch.setattr(timeline, "SETTLE_S", 0.0)
    work = timeline.load(
        cast("BenchClient", client),
        lambda messages, tokens: str(tokens).encode(),
        sessions=[[{}]] * sessions,
        plan=timeline.plan_for(parsed(), 0),
        seconds=(0, 0, 0),
        count=3,
        note=lambda piece: None,
    )
    figures = asyncio.run(work)
    assert (figures.failed, figures.wrong_length) == (0, 0)
    return came


def test_load_that_runs_out_of_requests_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="all 2 requests(.|\n)*raise --sessions"):
        run_load(InstantClient(), monkeypatch, sessions=2)
