"""A shell whose ranks live in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.aio.ranks import SEPARATE, ShellHarness


@pytest.fixture
async def played(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[ShellHarness]:
    """A started shell, with one worker group per group unless the test's parameter says otherwise."""
    played = ShellHarness(monkeypatch, tmp_path)
    await played.start(getattr(request, "param", SEPARATE))
    yield played
    await played.close()
