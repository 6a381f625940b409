"""The curve of requests over pauses: statements about limits compared with peers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.bench.curve.measure import plans_of, sets_of
from tests.bench.curve.report import draw, lines, verdict
from tests.bench.options import make_parser
from tests.bench.records import Run
from tests.unit.bench.test_peer_tables import run_of
from vsched.bench.load.figures import Times

POINTS = ["100/8", "50/2"]


def side(name: str, *runs: tuple[float, float]) -> list[Run]:
    """Return a run for each round: its rate, and its p99 between tokens."""
    made = []
    for repeat, (rate, pause) in enumerate(runs):
        one = run_of(name, rate, repeat=repeat, ttft=1.0)
        pauses = Times(p50=1.0, p95=2.0, p99=pause, mean=1.0, worst=2 * pause)
        made.append(
            msgspec.structs.replace(
                one, figures=msgspec.structs.replace(one.figures, itl_ms=pauses)
            )
        )
    return made


def sides_of(limited: float, pause: float) -> dict[str, list[Run]]:
    """Return the default, a limit of this rate and pause, and two peers of 40 and 60 ms."""
    return {
        "100/8": side("100/8", (10.0, 90.0), (10.0, 110.0)),
        "50/2": side("50/2", (limited, pause), (limited, pause)),
        "llamacpp": side("llamacpp", (8.0, 60.0)),
        "openvino": side("openvino", (9.0, 40.0)),
    }


@pytest.mark.parametrize(
    ("limited", "pause", "said"),
    [
        (9.6, 59.0, "under 5% of the requests: 50/2"),
        (9.0, 59.0, "costs 10% of the requests or more"),
        (9.6, 61.0, "no limit here comes to"),
    ],
)
def test_verdict_is_the_aim_beside_the_peer_with_the_shortest_pauses(
    limited: float, pause: float, said: str
) -> None:
    reported = verdict("text", sides_of(limited, pause), POINTS)
    assert said in reported
    assert "40.0 ms" in reported
    assert "no peer" in verdict("text", {"100/8": side("100/8", (1.0, 1.0))}, POINTS)


def test_table_compares_rounds_and_the_picture_is_drawn(tmp_path: Path) -> None:
    sides = sides_of(9.0, 50.0)
    reported = lines("text", sides, POINTS)
    assert "| text | vsched 50/2 | 9.00 | 0.90 |" in reported
    assert "| text | openvino | 9.00 | 0.90 |" in reported
    draw({"text": sides}, POINTS, "tiny25", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_points_are_settings_and_the_load_is_that_of_the_table() -> None:
    parser = make_parser()
    command = ["curve", "--peers", "p", "--out", "o", "--checkpoint", "tiny25", "--clients", "4"]
    options = parser.parse_args([*command, "--points", "100/8,25/1.5"])
    assert [sets_of(point) for point in options.points] == [
        ["generate.step_target_ms=100", "generate.step_target_ratio=8"],
        ["generate.step_target_ms=25", "generate.step_target_ratio=1.5"],
    ]
    (plan,) = plans_of(options, 0)
    assert (plan.sessions, plan.concurrency) == (12, 4)
    with pytest.raises(SystemExit):
        parser.parse_args([*command, "--points", "100"])
