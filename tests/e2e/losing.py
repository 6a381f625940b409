"""A rank or a host is lost in the middle of a stream, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

from tests.e2e.asking import Answer, Ask, begin, choices, drawn_image, read
from tests.e2e.conftest import assert_idle
from tests.patience import PATIENCE_S, patience, until
from vsched import Config, Engine
from vsched.aio.streams import Generation


async def answers_over_a_kill(
    engine: Engine,
    started: Sequence[Generation],
    *pids: int,
    tokens: int = 20,
    number: signal.Signals = signal.SIGKILL,
) -> list[Answer]:
    """Kill or stop ranks after a number of tokens; return the answers once their groups are back."""
    await until(lambda: sum(one.output_tokens for one in started) > tokens, "streams are running")
    assert any(one.reason is None for one in started), "too late to lose anything"
    for pid in pids:
        os.kill(pid, number)
    await until(lambda: engine.state == "degraded", "the loss is detected")
    found = await asyncio.gather(*map(read, started))
    await until(lambda: engine.state == "ready", "the lost group is back")
    return found


ASKS = [
    Ask("What is in the image?", [drawn_image(1)]),
    Ask("What differs?", [drawn_image(2), drawn_image(3, (140, 100))], count=40),
    Ask("0 1 2 3 4 5"),
]
LONG = Ask("Describe the picture.", [drawn_image(4)], count=400)


async def check_host_loss(
    here: Engine, elsewhere: Config, *, strike: Callable[[], object], mend: Callable[[], object]
) -> None:
    """Serve with ranks on other hosts of any kind, and lose the host of the generate stage.

    All tokens equal those of the engine `here`. The stream resumes, questions asked meanwhile are answered, the host is
    used again, and the loss leaves nothing behind.
    """
    *expected, long = [one.token_ids for one in await choices(here, [*ASKS, LONG], at_once=4)]
    async with Engine(elsewhere) as engine:
        found = [one.token_ids for one in await choices(engine, ASKS, at_once=3)]
        assert found == expected
        stream = await begin(engine, LONG)
        async with patience(3 * PATIENCE_S):
            answer = Answer()
            while len(answer.token_ids) < 20:
                answer.deltas.append(await anext(stream))
            assert len(answer.token_ids) < LONG.count
            strike()
            await until(lambda: engine.state != "ready", "the loss is detected")
            meanwhile = [await begin(engine, one) for one in ASKS]
            mend()
            answer.deltas += [delta async for delta in stream]
            assert answer.token_ids == long
            for tokens, requested in zip(expected, meanwhile, strict=True):
                assert Answer([delta async for delta in requested]).token_ids == tokens
        assert engine.state == "ready"
        (row,) = (row for row in engine.groups() if row["stage"] == "generate")
        assert row["losses"] == {"HostLost": 1}
        found = [one.token_ids for one in await choices(engine, ASKS, at_once=3)]
        assert found == expected, "the host is used again"
        await assert_idle(engine)
