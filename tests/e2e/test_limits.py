"""Some limits of memory: served, or one clear error; `python -m tests.limits` tries them all."""

from __future__ import annotations

import pytest

from tests.limits.attempt import Case, Outcome, Stage, attempt, judged

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]


@pytest.mark.parametrize("stage", ["encode", "generate", "together"])
@pytest.mark.parametrize(("limit_mib", "verdict"), [(50, "told"), (300, "told"), (1000, "served")])
async def test_limit_is_served_or_told_with_its_setting(
    stage: Stage, limit_mib: int, verdict: str, capfd: pytest.CaptureFixture[str]
) -> None:
    await tried(Case(stage, True, limit_mib), verdict, capfd)


@pytest.mark.parametrize("stage", ["encode", "generate"])
async def test_limit_that_libraries_die_of_is_told_with_its_setting(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new process meets the limit while it imports them."""
    await tried(Case(stage, False, 120), "told", capfd)


async def tried(case: Case, verdict: str, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    outcome: Outcome = judged(await attempt(case), capfd.readouterr().err)
    assert outcome.verdict == verdict, outcome
