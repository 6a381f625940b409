"""However a request ends early, it returns all its resources within one step."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.e2e.asking import TEXTS, Ask, answer, begin, drawn_image, held, in_flight, read
from tests.patience import PATIENCE_S, until
from vsched import Engine
from vsched.errors import RequestFailed
from vsched.faultpoints import armed

pytestmark = pytest.mark.asyncio(loop_scope="package")

LONG = Ask(TEXTS[1], [drawn_image(1000, (112, 84)), drawn_image(1001)], count=300)


async def test_abort_in_mid_stream_frees_everything_within_a_step(engine: Engine) -> None:
    """After the abort the request holds nothing; after the step in flight, neither does the step."""
    generation = await begin(engine, LONG)
    await anext(generation)
    steps = engine.statistics()["generate"]["steps"] + in_flight(engine)["steps_in_flight"]
    assert held(engine)["blocks_held"] > 0
    generation.abort()
    assert not any(held(engine).values()), held(engine)
    await until(lambda: not any(in_flight(engine).values()), "the step in flight ends")
    assert engine.statistics()["generate"]["steps"] <= steps
    rest = await read(generation)
    assert rest.finish_reason == "abort"
    generation.abort()  # after the end it does nothing


async def test_abort_while_prefilling_and_waiting(engine: Engine) -> None:
    """Twelve of twenty are aborted in any state; the others get the tokens they would have had."""
    asks = [Ask(f"{TEXTS[n % 5]} {n}", [drawn_image(1010 + n)], count=40) for n in range(20)]
    alone = [(await answer(engine, ask)).token_ids for ask in asks[::5]]
    async with asyncio.TaskGroup() as group:
        started = [group.create_task(begin(engine, ask)) for ask in asks]
    generations = [task.result() for task in started]
    for index, generation in enumerate(generations):
        if index % 5:
            generation.abort()
            await asyncio.sleep(0)
    found = await asyncio.gather(*(read(one) for one in generations))
    assert [one.token_ids for one in found[::5]] == alone
    assert {one.finish_reason for index, one in enumerate(found) if index % 5} <= {
        "abort",
        "length",
    }


async def test_cancelled_preparation_leaves_nothing(engine: Engine) -> None:
    """A client that leaves while its image is being decoded."""
    before = engine.statistics()["generate"]["admitted"]
    tasks = [asyncio.create_task(begin(engine, LONG)) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    await until(lambda: not any(held(engine).values()), "threads release the pixels")
    assert engine.statistics()["generate"]["admitted"] == before


async def test_stream_that_is_left_is_aborted(engine: Engine) -> None:
    """`Engine.stream` aborts the request when its reader stops."""
    prompt = engine.preprocessor.render(Ask("Count.").messages)
    stream = engine.stream(prompt=prompt, request_id="left")
    await anext(stream)
    assert engine.explain("left")
    await stream.aclose()
    assert engine.explain("left") == ""
    assert not any(held(engine).values())


async def test_clear_interrupts_all_and_reports_zero(engine: Engine) -> None:
    """One call ends every running and waiting request; each client gets an error, and the next request is served."""
    asks = [Ask(f"{TEXTS[n % 5]} {n}", [drawn_image(1040 + n)], count=150) for n in range(16)]
    async with asyncio.TaskGroup() as group:
        started = [group.create_task(begin(engine, ask)) for ask in asks]
    generations = [task.result() for task in started]
    await anext(generations[0])
    now = engine.statistics()
    assert now["running"] > 0
    assert now["waiting"] > 0
    assert await engine.clear() == {"running": 0, "waiting": 0}
    assert not any(held(engine).values())
    outcomes = await asyncio.gather(*(read(one) for one in generations), return_exceptions=True)
    errors = [one for one in outcomes if isinstance(one, RequestFailed)]
    assert len(errors) == len(asks)
    assert {(error.code, error.status) for error in errors} == {("cleared", 503)}
    assert len((await answer(engine, asks[0])).token_ids) == 150


async def test_clear_interrupts_requests_whose_images_are_being_decoded(engine: Engine) -> None:
    """Six being decoded or queued for a thread: they count as waiting, and end at once like waiting ones."""
    gate = threading.Event()

    def hold(name: str, _subject: str) -> None:
        if name == "media.decode":
            assert gate.wait(PATIENCE_S)

    asks = [Ask(TEXTS[n % 5], [drawn_image(1080 + n)], count=20) for n in range(6)]
    admitted = engine.statistics()["generate"]["admitted"]
    try:
        with armed(hold):
            tasks = [asyncio.create_task(begin(engine, ask)) for ask in asks]
            await until(lambda: engine.statistics()["media"]["decode"]["bytes_used"], "decoding")
            await until(
                lambda: engine.statistics()["media"]["preparing"] == 6, "all are in preparation"
            )
            assert engine.statistics()["waiting"] == 6
            assert await engine.clear() == {"running": 0, "waiting": 0}
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        gate.set()
    errors = [one for one in outcomes if isinstance(one, RequestFailed)]
    assert [(error.code, error.status) for error in errors] == [("cleared", 503)] * 6
    await until(lambda: not any(held(engine).values()), "threads release the pixels")
    assert engine.statistics()["generate"]["admitted"] == admitted
    assert len((await answer(engine, asks[0])).token_ids) == 20
