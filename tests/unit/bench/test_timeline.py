"""Requests/s while neighbours come and go: the load, intervals, and the table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from tests.bench import options, timeline
from tests.bench.records import Run
from tests.unit.bench.test_peer_tables import run_of
from vsched.bench.load.client import BenchClient, Sample
from vsched.errors import ConfigError

SECONDS = (10, 20, 15)


def parsed(*words: str) -> argparse.Namespace:
    line = ["timeline", "--out", "o", "--peers", "p", "--clients", "2", *words]
    return options.make_parser().parse_args(line)


def rates(before: float, beside: float, after: float, *, late: int = 0) -> list[float]:
    """Return intervals of half a second; the last stretch begins late by some."""
    return [before] * 20 + [beside] * (40 + late) + [after] * (30 - late)


def timed(side: str, found: list[float], repeat: int = 0) -> Run:
    return msgspec.structs.replace(run_of(side, 1.0, repeat=repeat), rates=found)


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


@pytest.mark.slow
def test_table_has_a_line_a_side_and_the_picture_is_drawn(tmp_path: Path) -> None:
    found = {
        "vsched": [
            timed("vsched", rates(10.0, 6.0, 10.0)),
            timed("vsched", rates(10.0, 4.0, 10.0, late=2), repeat=1),
        ],
        "vllm": [timed("vllm", rates(8.0, 2.0, 4.0))],
    }
    ours, theirs = timeline.lines(found, SECONDS).splitlines()[2:]
    assert ours.startswith("| vsched | 10.0 | 5.00 | ")
    assert "| 0.50 (0.40 to 0.60) | 0.0, 1.0 | 0 | 2 |" in ours
    assert "| 0.25 (0.25 to 0.25) | not | 0 | 1 |" in theirs
    timeline.draw_rates(found, SECONDS, "mid25", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000


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


def test_first_answers_of_clients_differ_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    client = InstantClient()
    assert run_load(client, monkeypatch, sessions=100) == [3]
    assert client.lengths[:3] == [32, 16, 32]


def test_load_that_runs_out_of_requests_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="all 2 requests(.|\n)*raise --sessions"):
        run_load(InstantClient(), monkeypatch, sessions=2)
