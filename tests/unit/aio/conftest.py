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
    """A started shell, with the worker groups of the test's parameter, of its module's `GROUPS`, or `SEPARATE`."""
    played = ShellHarness(monkeypatch, tmp_path)
    await played.start(getattr(request, "param", getattr(request.module, "GROUPS", SEPARATE)))
    yield played
    await played.close()
