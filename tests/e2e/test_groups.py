"""Groups of two ranks, two of each stage: equal to one rank, and to themselves when ranks are lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import pytest

from tests.e2e.asking import Answer, Ask, answer, begin, mixed_asks
from tests.e2e.conftest import assert_idle
from tests.e2e.test_grammars import LIST
from tests.patience import PATIENCE_S, patience, until
from tests.traces import is_alive
from vsched import Config, Engine, SamplingParams
from vsched.api.structured_outputs import constraint_from_schema

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.slow,
    pytest.mark.thorough,  # `test_swapping.py` has two ranks, `test_adapters.py` two replicas, both with losses
]

DRAWN = 8
GROUPS = (
    "encode.replicas=2",
    "encode.tensor_parallel=2",
    "generate.replicas=2",
    "generate.tensor_parallel=2",
    # Nothing is kept, so the encoders never run out of work.
    "encode.eviction.use=none",
    "deadlines.rank_timeout_s=6",
)
DRAWS = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    min_p=0.01,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logit_bias=((40, 2.0), (41, -100.0)),
    bad_words=((45,), (40, 46)),
    min_tokens=10,
    max_tokens=60,
    ignore_eos=True,
)
CONSTRAINED = SamplingParams(
    max_tokens=300, temperature=1.2, seed=11, grammar=constraint_from_schema(LIST)
)


@dataclass(frozen=True)
class Question:
    """A question, and the tokens of its answer from one rank."""

    ask: Ask
    sampling: SamplingParams | None
    tokens: list[int]
    finish_reason: str | None


async def answered_questions(engine: Engine) -> list[Question]:
    """Return greedy, sampled and constrained questions, with the answers of single undisturbed ranks."""
    asks = mixed_asks()
    requested: list[tuple[Ask, SamplingParams | None]] = [(ask, None) for ask in asks]
    for number, ask in enumerate(asks[:DRAWN]):
        requested.append((ask, msgspec.structs.replace(DRAWS, seed=number)))
    requested += [(asks[1], CONSTRAINED), (asks[2], CONSTRAINED)]
    found = [await answer(engine, ask, sampling) for ask, sampling in requested]
    return [
        Question(ask, sampling, each.token_ids, each.finish_reason)
        for (ask, sampling), each in zip(requested, found, strict=True)
    ]


class Load:
    """Clients that ask one question after the other, and compare each answer."""

    def __init__(self, engine: Engine, questions: Sequence[Question]) -> None:
        self.tokens = 0
        self.over = asyncio.Event()
        self._engine = engine
        self._questions = questions

    async def run(self, *, clients: int) -> None:
        """Ask each question at least once, and continue until `over`."""
        numbers = count()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(numbers))

    async def more(self, tokens: int) -> None:
        """Wait for a number of further tokens."""
        enough = self.tokens + tokens
        await until(lambda: self.tokens >= enough, "tokens come")

    async def _client(self, numbers: Iterator[int]) -> None:
        while (number := next(numbers)) < len(self._questions) or not self.over.is_set():
            question = self._questions[number % len(self._questions)]
            answer = Answer()
            async with patience():
                async for delta in await begin(self._engine, question.ask, question.sampling):
                    answer.deltas.append(delta)
                    self.tokens += len(delta.token_ids)
            assert answer.token_ids == question.tokens
            assert answer.text == self._engine.preprocessor.detokenize(question.tokens)
            assert answer.finish_reason == question.finish_reason


def row(engine: Engine, group: str) -> dict[str, Any]:
    """An operator's view of a group."""
    return next(each for each in engine.groups() if each["name"] == group)


async def test_groups_of_ranks_equal_one_rank_and_lose_no_token_to_faults(
    configure: Callable[..., Config], engine: Engine
) -> None:
    """A rank of each stage exits or hangs under load; diverging ranks are in `tests/unit/rank`.

    Eight ranks, two groups of two for each stage; requests are preempted now and then.
    """
    questions = await answered_questions(engine)
    drawn = {tuple(one.tokens[:16]) for one in questions if one.sampling not in (None, CONSTRAINED)}
    assert len(drawn) == DRAWN, "equality proves nothing"
    assert [one.finish_reason for one in questions].count("stop") == 2, "the constrained ones"
    async with Engine(configure("nano25", *GROUPS)) as groups:
        load = Load(groups, questions)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(clients=12))
            # A decision may find a rank gone before the engine gets the exit of its child.
            await load.more(200)
            await lose(groups, "generate-0", 1, signal.SIGKILL, ("killed by SIGKILL", "is gone"))
            await load.more(200)
            await lose(groups, "encode-0", 0, signal.SIGSTOP, ("deadlines.", "was silent"))
            load.over.set()
        statistics = groups.statistics()
        for stage in ("encode", "generate"):
            busy = [statistics["busy_ms"][f"{stage}-{index}"] for index in range(2)]
            assert min(busy) > 0, busy
        assert statistics["generate"]["preemptions"] > 0, "the KV cache was not small enough"
        await assert_idle(groups)
        every = groups.rank_pids
    assert not any(map(is_alive, every))


async def lose(
    engine: Engine, name: str, rank: int, number: signal.Signals, reasons: tuple[str, ...]
) -> None:
    """Signal a rank, and wait until its group, and no other, has been lost and is back."""
    before = {each["name"]: each["restarts"] for each in engine.groups()}
    os.kill(row(engine, name)["ranks"][rank]["pid"], number)
    await until(lambda: row(engine, name)["state"] == "down", "the loss is noticed")
    assert engine.state == "degraded"
    await until(lambda: all(each["state"] == "up" for each in engine.groups()), "it is back")
    after = {each["name"]: each["restarts"] - before[each["name"]] for each in engine.groups()}
    assert after == {group: int(group == name) for group in after}
    reason = row(engine, name)["last_loss"]["reason"]
    assert any(words in reason for words in reasons), reason
