"""Verdicts on starts under a limit, and the order of limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.limits import __main__ as command
from tests.limits.attempt import Case, Outcome, Stage, Verdict, gist, judged, verdict_on
from tests.limits.report import table
from vsched.config import load_config

ENCODE = "memory ran out while loading. Remedy: raise encode.memory_limit."
TRACEBACK = "Traceback (most recent call last):\n  ...\nMemoryError\n"


@pytest.mark.parametrize(
    ("stage", "message", "verdict"),
    [
        ("encode", ENCODE, "told"),
        ("together", ENCODE, "wrong setting"),
        ("generate", ENCODE, "wrong setting"),
        ("encode", "raise encode.memory_limit or generate.memory_limit", "wrong setting"),
        ("together", "raise encode.memory_limit or generate.memory_limit", "told"),
        ("encode", "encode: rank 0 was killed by SIGABRT", "no setting"),
    ],
)
def test_verdict_on_an_error_goes_by_the_settings_it_names(
    stage: Stage, message: str, verdict: Verdict
) -> None:
    assert verdict_on(stage, message) == verdict


def test_judged_takes_no_traceback_for_an_error() -> None:
    assert judged(Outcome("served"), "INFO fine\n") == Outcome("served")
    assert judged(Outcome("served"), TRACEBACK) == Outcome("traceback", "MemoryError")
    assert judged(Outcome("told", ENCODE), TRACEBACK) == Outcome("traceback", ENCODE)
    assert judged(Outcome("hang"), TRACEBACK) == Outcome("hang")


@pytest.mark.parametrize("stage", ["encode", "generate", "together"])
def test_case_limits_its_stage_alone(stage: Stage) -> None:
    config = load_config(None, sets=Case(stage, True, 60).settings, environ={}).config
    limits = {config.encode.memory_limit, config.generate.memory_limit}
    assert (config.placement == "together") == (stage == "together")
    assert limits == ({str(30 << 20)} if stage == "together" else {"60MiB", "2GiB"})
    assert (config.encode.memory_limit == "60MiB") == (stage == "encode")


def test_gist_summarizes_the_run() -> None:
    assert gist(ENCODE) == "memory ran out while loading"
    killed = "encode: rank 0 was killed by SIGABRT; it was last weights, under a memory limit of 4"
    assert gist(killed) == "encode: was killed by SIGABRT; it was last weights"
    assert gist("it does not fit on cpu limit of 71 (bytes): value 3, limit 2") == "it does not fit"


def test_table_joins_neighbours_that_ended_alike() -> None:
    reported, lost = Outcome("told", ENCODE), Outcome("hang", "the engine")
    limits = {60: reported, 50: reported, 70: lost, 80: Outcome("served")}
    outcomes = {Case("encode", True, limit): one for limit, one in limits.items()}
    outcomes[Case("encode", False, 90)] = Outcome("served")
    assert table(outcomes).splitlines()[2:] == [
        "| encode | forked | 50-60 | memory ran out while loading | `encode.memory_limit` |",
        "| encode | forked | 70 | **hang**: the engine |  |",
        "| encode | forked | 80 | served |  |",
        "| encode | new processes | 90 | served |  |",
    ]


class FakeWorker:
    """Serves from 80 MiB on, and reports less; 60 MiB once with the wrong setting."""

    def __init__(self, _folder: Path) -> None:
        self.tried.clear()

    tried: list[int] = []  # noqa: RUF012 - of the last command

    def attempt(self, case: Case) -> Outcome:
        self.tried.append(case.limit_mib)
        if case.limit_mib >= 80:
            return Outcome("served")
        return Outcome("told", ENCODE)

    def close(self) -> None:
        pass


def test_command_stops_when_served_goes_on_where_it_was_and_retries_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Worker", FakeWorker)
    results, written = tmp_path / "results.jsonl", tmp_path / "table.md"
    command.Outcomes(results).note(Case("encode", True, 60), Outcome("hang"))
    words = ["--stage", "encode", "--ranks", "forked", "--served", "2"]
    words += ["--results", str(results), "--table", str(written)]
    assert command.main([*words, "--to", "50"]) == 1, "60 is a failure that remains"
    assert FakeWorker.tried == [50]
    assert "encode, 60 MiB: hang" in capsys.readouterr().out
    assert command.main([*words, "--to", "500"]) == 0
    assert FakeWorker.tried == [60, 70, 80, 90]
    assert "| 50-70 | memory ran out while loading |" in written.read_text()
    assert command.main([*words, "--to", "500"]) == 0
    assert FakeWorker.tried == []
