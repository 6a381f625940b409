"""The shell's side of admission on arrival: refusals before preparation, holds, and clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import patience
from tests.unit.aio.ranks import ShellHarness
from tests.unit.aio.test_preparations import SlowMedia, begin, engine_with
from vsched.errors import RequestRefused
from vsched.kernel.events import TimerFired
from vsched.policy import (
    Admit,
    ArrivalDecision,
    ArrivalView,
    Hold,
    Redirect,
    RequestPolicy,
    Shed,
)
from vsched.types import SamplingParams


class Told(RequestPolicy, frozen=True, kw_only=True):
    """Decides by tenant; held requests are let in when asked again."""

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        match view.request.tenant:
            case "shed":
                return Shed("too many, value 3, limit 2", 7, 503)
            case "elsewhere":
                return Redirect("http://other:8000/")
            case "held" if not view.request.asks:
                return Hold(view.now_ns + 50_000_000_000)
            case _:
                return Admit()


def ask(engine: Any, tenant: str) -> Any:
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    return engine.generate(
        prompt=[1, 2, 3], sampling=sampling, request_id=tenant or "r", tenant=tenant
    )


@pytest.fixture
def media() -> SlowMedia:
    return SlowMedia()


@pytest.fixture
def engine(played: ShellHarness, media: SlowMedia) -> Any:
    played.shell._kernel._gate._seat.ask = Told().arrive
    return engine_with(played, media)


def door(played: ShellHarness) -> tuple[int, int]:
    counts = played.shell.statistics()["arrival"]
    return counts["held_now"], counts["preparing_now"]


async def test_rejected_request_is_not_prepared(engine: Any, media: SlowMedia) -> None:
    with pytest.raises(RequestRefused) as shed:
        await ask(engine, "shed")
    error = shed.value
    assert (error.message, error.code) == ("too many, value 3, limit 2.", "shed")
    assert (error.status, error.retry_after_s) == (503, 7)
    with pytest.raises(RequestRefused) as away:
        await ask(engine, "elsewhere")
    assert (away.value.status, away.value.location) == (307, "http://other:8000")
    assert media.started.empty()


async def test_held_request_waits_and_is_served(
    engine: Any, media: SlowMedia, played: ShellHarness
) -> None:
    task = asyncio.create_task(ask(engine, "held"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert door(played) == (1, 0)
    assert media.started.empty()
    assert played.shell.statistics()["waiting"] == 1
    assert "the arrival policy holds it" in engine.explain("held")
    played.shell._kernel._gate._held[1].until_ns = 0
    played.shell._kernel._gate.due_ns = 0
    played.shell.handle(TimerFired())
    async with patience():
        await media.started.get()
        assert door(played) == (0, 1)
        media.ready.set()
        assert (await task).request_id == "held"
    assert door(played) == (0, 0)


async def test_clients_that_leave_leave_nothing_at_the_door(
    engine: Any, media: SlowMedia, played: ShellHarness
) -> None:
    """One request on hold, one in preparation, one whose preparation fails, and one with numbers out of range."""
    held = asyncio.create_task(ask(engine, "held"))
    (preparing,) = await begin(engine, media, 1)
    assert door(played) == (1, 1)
    for task in (held, preparing):
        task.cancel()
    await asyncio.gather(held, preparing, return_exceptions=True)
    assert door(played) == (0, 0)
    media.ready.set()
    with pytest.raises(RequestRefused):
        await engine.generate(
            prompt=[5000], request_id="r", sampling=SamplingParams(temperature=0.0, max_tokens=1)
        )
    assert door(played) == (0, 0)
    assert played.shell.statistics()["waiting"] == 0
