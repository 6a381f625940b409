"""Some limits of memory: served, or one clear error; `python -m tests.limits` tries them all."""

from __future__ import annotations

import pytest

from tests.limits.attempt import Case, Outcome, Stage, attempt, judged

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]


@pytest.mark.parametrize(
    ("stage", "limit_mib", "verdict"),
    [
        ("encode", 50, "told"),
        ("generate", 300, "told"),
        ("together", 300, "told"),
        ("together", 1000, "served"),
    ],
)
async def test_limit_is_served_or_told_with_its_setting(
    stage: Stage, limit_mib: int, verdict: str, capfd: pytest.CaptureFixture[str]
) -> None:
    await tried(Case(stage, True, limit_mib), verdict, capfd)


async def test_limit_that_libraries_die_of_is_reported_with_its_setting(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A new process meets the limit while it imports them."""
    await tried(Case("generate", False, 120), "told", capfd)


async def tried(case: Case, verdict: str, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    outcome: Outcome = judged(await attempt(case), capfd.readouterr().err)
    assert outcome.verdict == verdict, outcome
