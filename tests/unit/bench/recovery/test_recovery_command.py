"""The recovery table: figures of losses, and lost tokens as failures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.bench.parts.__main__ import app
from tests.bench.parts.recovery import measure
from tests.bench.parts.recovery.measure import Recovery, RecoveryCase


def loss(
    case: RecoveryCase, last_s: float, *, complete: bool = True, same: bool = True
) -> Recovery:
    return Recovery(
        case=case, ends_s=[0.1, 0.2, 0.3, 0.4, last_s], complete=complete, same_tokens=same
    )


@pytest.mark.parametrize(
    ("dtype", "complete", "same", "kept"),
    [
        ("float32", True, True, True),
        ("float32", True, False, False),
        ("bfloat16", True, False, True),
        ("bfloat16", False, False, False),
    ],
)
def test_recovery_promises_the_same_tokens_in_float32(
    dtype: str, *, complete: bool, same: bool, kept: bool
) -> None:
    assert loss(RecoveryCase(dtype=dtype), 1.0, complete=complete, same=same).kept is kept


def test_recovery_shows_lowest_median_and_highest_of_each_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cases are the product of the options; a stream that lost tokens is an exit code of 1."""
    requested: list[RecoveryCase] = []

    async def measured(
        settings: list[str], *, cases: list[RecoveryCase], **_: object
    ) -> list[Recovery]:
        assert settings == ["model.path=nowhere"]
        requested.extend(cases)
        return [
            *(loss(case, last_s) for last_s in (1.25, 0.75, 1.5) for case in cases[:-1]),
            loss(cases[-1], 3.0, same=False),
        ]

    monkeypatch.setattr(measure, "measure_recovery", measured)
    options = ["--dtype", "float32", "--busy", "0", "--busy", "3", "--new-processes"]
    done = CliRunner().invoke(app, ["recovery", "nowhere", *options])
    assert [(case.busy, case.forked) for case in requested] == [
        (0, True),
        (0, False),
        (3, True),
        (3, False),
    ]
    assert done.exit_code == 1
    lines = [line.split("│") for line in done.output.splitlines() if "first new token" in line]
    assert [[cell.strip() for cell in line[2:5]] for line in lines] == [
        *[["0.75", "1.25", "1.50"]] * 3,
        ["3.00", "3.00", "3.00"],
    ]
    assert "3 busy loops, new process" in done.output


def test_busy_loops_end_with_the_measurement() -> None:
    with measure._busy_loops(2):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert len(children) >= 2
    left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert len(left) <= len(children) - 2
