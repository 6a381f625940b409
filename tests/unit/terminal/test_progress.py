"""Progress lines while a model loads without a terminal."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from vsched.terminal.progress import LoadingLines, loading_progress


def test_loading_is_reported_in_lines_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """A line when a group begins something new, then one every five seconds."""
    now_s = 0.0
    report = LoadingLines(lambda: now_s)
    with caplog.at_level(logging.INFO, "vsched"):
        report("generate-0", "starting", 0.0)
        for percent in range(1, 101):
            now_s = percent / 10
            report("generate-0", "language model", percent / 100)
        report("encode", "language model", 1.0)
    assert caplog.messages == [
        "generate-0: starting",
        "generate-0: language model",
        "generate-0: language model 51%",
        "encode: language model",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_loading_is_a_bar_on_a_terminal_and_a_log_line_elsewhere(
    caplog: pytest.LogCaptureFixture, *, terminal: bool
) -> None:
    file = io.StringIO()
    with (
        caplog.at_level(logging.INFO, "vsched"),
        loading_progress(Console(file=file, force_terminal=terminal)) as report,
    ):
        report("generate", "starting", 0.0)
    assert caplog.messages == ([] if terminal else ["generate: starting"])
    assert ("starting" in file.getvalue()) == bool(file.getvalue()) == terminal
