"""`python -m tests.bench.kernel` drives the real kernel, for the configured numbers."""

from __future__ import annotations

import sys

import pytest

from tests.bench import kernel


def test_the_command_prints_a_table_and_how_far_a_kernel_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    options = "--replicas 2 1 --running 1 --events 2 --repeats 1"
    monkeypatch.setattr(sys, "argv", ["kernel", *options.split()])
    kernel.main(lines.append)
    assert [line.split("|")[1].strip() for line in lines[1:3]] == ["1", "2"]
    assert "One core drives" in lines[-1]
