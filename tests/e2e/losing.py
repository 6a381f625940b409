"""A host is lost in the middle of a stream, and comes back: invariants for any kind of loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.e2e.asking import Answer, Ask, begin, choices
from tests.e2e.conftest import assert_idle
from tests.patience import PATIENCE_S, patience, until
from vsched import Engine


async def check_stream_outlives_host(
    engine: Engine,
    long: tuple[Ask, list[int]],
    asks: Sequence[tuple[Ask, list[int]]],
    *,
    strike: Callable[[], object],
    mend: Callable[[], object],
) -> None:
    """Lose the host of the generate stage; questions come with their expected tokens.

    The stream resumes with its tokens, questions asked meanwhile are answered, the host is used again, and the loss
    leaves nothing behind.
    """
    ask, expected = long
    stream = await begin(engine, ask)
    async with patience(3 * PATIENCE_S):
        answer = Answer()
        while len(answer.token_ids) < 20:
            answer.deltas.append(await anext(stream))
        assert len(answer.token_ids) < ask.count
        strike()
        await until(lambda: engine.state != "ready", "the loss is detected")
        meanwhile = [await begin(engine, one) for one, _ in asks]
        mend()
        answer.deltas += [delta async for delta in stream]
        assert answer.token_ids == expected
        for (_, tokens), requested in zip(asks, meanwhile, strict=True):
            assert Answer([delta async for delta in requested]).token_ids == tokens
    assert engine.state == "ready"
    (row,) = (row for row in engine.groups() if row["stage"] == "generate")
    assert row["losses"] == {"HostLost": 1}
    found = [one.token_ids for one in await choices(engine, [one for one, _ in asks], at_once=3)]
    assert found == [tokens for _, tokens in asks], "the host is used again"
    await assert_idle(engine)
