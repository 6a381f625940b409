"""Requests on arrival and in preparation: refused before any work, counted, held, waited for, and ended like others."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import patience
from tests.unit.aio.ranks import ShellHarness, fail_on
from tests.unit.kernel.setups import ByTenant
from tests.unit.rank.worker_groups import Text
from vsched.aio.arrivals import PendingArrivals, check_numbers, checked_prompt, refusal_error
from vsched.aio.streams import Generation
from vsched.errors import RequestFailed, RequestRefused
from vsched.kernel.commands import RefusalCode, Refuse
from vsched.kernel.events import Cleared, PolicyReplaced
from vsched.types import SamplingParams


class SlowMedia:
    """Prepares prompts when a test allows it, and counts prompts given out and returned."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.leases = 0
        self.started: asyncio.Queue[None] = asyncio.Queue()

    async def prepare(self, prompt: list[int], images: object, cache_salt: str = "") -> Any:
        del images, cache_salt
        self.started.put_nowait(None)
        await self.ready.wait()
        self.leases += 1
        return SimpleNamespace(token_ids=prompt, items=(), lease=self)

    def release(self) -> None:
        self.leases -= 1

    def clear(self) -> None:
        pass


class Preparations:
    """An engine over a shell, whose prompts are prepared when a test allows it."""

    def __init__(self, played: ShellHarness) -> None:
        self.shell, self.ranks, self.media = played.shell, played.ranks, SlowMedia()
        played.shell.kernel._gate._seat.ask = ByTenant(hold_ns=50_000_000_000).arrive
        engine = self.engine = played.engine()
        assert engine._running is not None
        engine._running = dataclasses.replace(engine._running, media=cast("Any", self.media))
        engine.info = cast("Any", SimpleNamespace(vocab_size=1000, stop_token_ids=()))
        engine.preprocessor = cast("Any", SimpleNamespace(detokenizer=lambda **_: Text()))

    def ask(
        self, tenant: str = "", *, request_id: str = "r", prompt: Sequence[int] = (1, 2, 3)
    ) -> Coroutine[Any, Any, Generation]:
        sampling = SamplingParams(temperature=0.0, max_tokens=3)
        return self.engine.generate(
            prompt=[*prompt], sampling=sampling, request_id=request_id, tenant=tenant
        )

    async def begin(self, count: int) -> list[asyncio.Task[Generation]]:
        """Start requests, and return once all of them are being prepared."""
        tasks = [asyncio.create_task(self.ask(request_id=f"r{number}")) for number in range(count)]
        async with patience():
            for _ in tasks:
                await self.media.started.get()
        return tasks

    def counts(self) -> tuple[int, int]:
        """Number of requests on hold, and in preparation."""
        counts = self.shell.statistics()["arrival"]
        return counts["held_now"], counts["preparing_now"]


@pytest.fixture
def made(played: ShellHarness) -> Preparations:
    return Preparations(played)


async def errors_of(tasks: list[asyncio.Task[Generation]]) -> list[tuple[str, int, int | None]]:
    """Errors of the requests: all of them failed."""
    async with patience():
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, RequestFailed) for one in outcomes), outcomes
    return [(one.code, one.status, one.retry_after_s) for one in cast("Any", outcomes)]


async def test_requests_in_preparation_wait(made: Preparations) -> None:
    """Statistics count them, with their state."""
    tasks = await made.begin(6)
    now = made.shell.statistics()
    assert (now["running"], now["waiting"]) == (0, 6)
    assert [one["request_id"] for one in now["live"]] == [f"r{number}" for number in range(6)]
    assert "its prompt and images are being prepared" in made.engine.explain("r3")
    assert made.engine.explain("another") == ""
    made.media.ready.set()
    await asyncio.gather(*tasks)
    now = made.shell.statistics()
    assert now["running"] + now["waiting"] == 6
    assert "prepared" not in made.engine.explain("r3")


@pytest.mark.parametrize("is_ready", [False, True], ids=["at work", "just ready"])
async def test_clear_interrupts_preparations(made: Preparations, *, is_ready: bool) -> None:
    """Like a request waiting in the kernel, even if its preparation has just ended."""
    tasks = await made.begin(6)
    if is_ready:
        made.media.ready.set()
    assert await made.engine.clear() == {"running": 0, "waiting": 0}
    assert await errors_of(tasks) == [("cleared", 503, 5)] * 6
    assert made.media.leases == 0
    made.media.ready.set()
    (again,) = await made.begin(1)
    assert (await again).request_id == "r0"


@pytest.mark.parametrize("fails", [False, True], ids=["stop", "a scheduler that fails"])
async def test_end_of_the_shell_ends_requests_in_preparation_with_a_reply(
    made: Preparations, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    tasks = await made.begin(3)
    if fails:
        fail_on(monkeypatch, Cleared)
        made.shell.handle(Cleared())
    else:
        await made.shell.stop()
    assert await errors_of(tasks) == [("given_up" if fails else "stopping", 503, 5)] * 3


async def test_drain_serves_requests_in_preparation(made: Preparations) -> None:
    """They were accepted: a drain refuses only later requests, and ends once all of these have."""
    tasks = await made.begin(2)
    draining = asyncio.create_task(made.engine.drain())
    await asyncio.sleep(0)
    assert made.engine.state == "draining"
    assert not draining.done()
    made.media.ready.set()
    streams = [await task for task in tasks]
    assert not draining.done()
    async with patience():
        while not draining.done():
            made.ranks.run(1)
            await asyncio.sleep(0)
    assert [stream.output_tokens for stream in streams] == [3, 3]


@pytest.mark.parametrize("leaves", [False, True])
async def test_interruption_ends_the_preparation_and_not_its_caller(*, leaves: bool) -> None:
    """It does not swallow the cancellation of a client that leaves at the same time."""
    arrivals = PendingArrivals()

    async def caller() -> int:
        with pytest.raises(RequestFailed), arrivals.track_arrival("r"):
            await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(0)
        return task.cancelling()

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    arrivals.interrupt(RequestFailed("cleared", code="cleared", status=503))
    assert len(arrivals) == 0
    if leaves:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert await task == 0
    await arrivals.wait_idle()


async def test_rejected_request_is_not_prepared(made: Preparations) -> None:
    with pytest.raises(RequestRefused) as shed:
        await made.ask("shed")
    error = shed.value
    assert (error.message, error.code) == ("0 wait, 0 of yours.", "shed")
    assert (error.status, error.retry_after_s) == (503, 7)
    with pytest.raises(RequestRefused) as away:
        await made.ask("elsewhere")
    assert (away.value.status, away.value.location) == (307, "http://other:8000")
    assert made.media.started.empty()


async def test_held_request_waits_and_is_served(made: Preparations) -> None:
    task = asyncio.create_task(made.ask("held", request_id="held"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert made.counts() == (1, 0)
    assert made.media.started.empty()
    assert made.shell.statistics()["waiting"] == 1
    assert "the arrival policy holds it" in made.engine.explain("held")
    made.shell.handle(PolicyReplaced(tables={"arrival": {"use": "open"}}))
    async with patience():
        await made.media.started.get()
        assert made.counts() == (0, 1)
        made.media.ready.set()
        assert (await task).request_id == "held"
    assert made.counts() == (0, 0)


async def test_clients_that_leave_leave_nothing_at_the_door(made: Preparations) -> None:
    """One request on hold, one in preparation, and one with numbers out of range."""
    held = asyncio.create_task(made.ask("held", request_id="held"))
    (preparing,) = await made.begin(1)
    assert made.counts() == (1, 1)
    for task in (held, preparing):
        task.cancel()
    await asyncio.gather(held, preparing, return_exceptions=True)
    assert made.counts() == (0, 0)
    made.media.ready.set()
    with pytest.raises(RequestRefused):
        await made.ask(prompt=[5000])
    assert made.counts() == (0, 0)
    assert made.shell.statistics()["waiting"] == 0


@pytest.mark.parametrize("code", RefusalCode)
def test_refusal_of_every_code_has_words(code: RefusalCode) -> None:
    error = refusal_error(Refuse("r", code, 3, 2, "some.key", detail=(4, 5), reason="it is gone"))
    assert error.code == code.value
    assert error.message.count(". Remedy: ") == 1
    assert error.message.endswith(".")
    assert (error.status == 429) == (error.retry_after_s is not None)


VOCABULARY = 100
INT32_MAX = 2**31 - 1
SEED_MAX = 2**63 - 1
PROMPT, STOP_TOKEN = "a token id of the prompt", "a stop token id"


@pytest.mark.parametrize(
    ("name", "limit", "values"),
    [
        (PROMPT, "0 to 99", [-1, 100, 2**31]),
        ("the length of a stop string", f"1 to {INT32_MAX}", [0]),
        (STOP_TOKEN, "0 to 99", [100, -1, 2**70]),
        ("seed", f"{-SEED_MAX - 1} to {SEED_MAX}", [2**63, -(2**70)]),
        ("max_tokens", f"0 to {INT32_MAX}", [2**31, -1]),
        ("min_tokens", f"0 to {INT32_MAX}", [2**31, -1]),
        ("top_k", f"-1 to {INT32_MAX}", [2**31, -2]),
        ("logprobs", "0 to 100", [101, -1]),
        ("temperature", "0 to 1000000.0", [math.nan, math.inf, -0.1]),
        ("top_p", "0 to 1", [1.1, math.nan]),
        ("min_p", "0 to 1", [-0.1]),
        ("repetition_penalty", "0.001 to 1000.0", [math.inf]),
        ("presence_penalty", "-1000000.0 to 1000000.0", [math.nan]),
        ("frequency_penalty", "-1000000.0 to 1000000.0", [-math.inf]),
    ],
)
def test_check_numbers_refuses(name: str, limit: str, values: list[Any]) -> None:
    for value in values:
        token_ids, sampling = [1, 2], {name: value}
        if name == PROMPT:
            token_ids, sampling = [1, value, 2], {}
        elif name == STOP_TOKEN:
            sampling = {"stop_token_ids": (1, value)}
        elif name == "the length of a stop string":
            sampling = {"stop": ("x", "")}
        with pytest.raises(RequestRefused) as caught:
            check_numbers(token_ids, SamplingParams(**sampling), vocab_size=VOCABULARY)
        assert (
            caught.value.message == f"{name} is out of bounds: value {value}, limit {limit}. "
            "Remedy: send a value within the limit."
        )
        assert (caught.value.code, caught.value.status) == ("invalid_value", 400)


@pytest.mark.parametrize(
    ("token_ids", "sampling"),
    [
        ([], {}),
        ([0, 99], {"stop_token_ids": (0, 99)}),
        ([1], {"seed": SEED_MAX, "max_tokens": INT32_MAX, "min_tokens": INT32_MAX}),
        ([1], {"seed": 0, "max_tokens": 0, "top_k": -1, "top_p": 0, "min_p": 1}),
        ([1], {"temperature": 0, "logprobs": 0}),
        ([1], {"temperature": 1e6, "logprobs": 100, "presence_penalty": -2}),
    ],
    ids=str,
)
def test_check_numbers_accepts_the_limits(token_ids: list[int], sampling: dict[str, Any]) -> None:
    check_numbers(token_ids, SamplingParams(**sampling), vocab_size=VOCABULARY)


def test_checked_prompt_keeps_the_class_of_a_text() -> None:
    """A rendered prompt marks positions where special tokens are a client's text, not the template's."""

    class Rendered(str):
        marks = (3,)

    rendered = Rendered("<s>")
    assert checked_prompt(rendered) is rendered
