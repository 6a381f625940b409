"""Machines that tests pretend to run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vsched.worker import memory


def pretend_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Have this process see so many cores, and no control group with a share of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(memory, "_GROUPS", Path("/nowhere"))
