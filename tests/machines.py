"""Simulated machines for tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vsched.worker import memory


def pretend_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Let this process see this number of cores, and no quota of a control group."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(memory, "_GROUPS", Path("/nowhere"))
