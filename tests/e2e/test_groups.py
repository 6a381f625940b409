"""Groups of two ranks, two of each stage: equal to one rank, also when ranks are lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.e2e.asking import DRAWN, Ask, answer, begin, mixed_asks
from tests.e2e.conftest import assert_idle
from tests.e2e.losing import answers_over_a_kill
from tests.e2e.test_grammars import LIST
from tests.patience import PATIENCE_S
from tests.traces import is_alive
from vsched import Config, Engine, SamplingParams
from vsched.api.structured_outputs import constraint_from_schema

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.slow,
    pytest.mark.thorough,  # `test_swapping.py` has two ranks, `test_adapters.py` two replicas, both with losses
]

SEEDS = 6
GROUPS = (
    "encode.replicas=2",
    "encode.tensor_parallel=2",
    "generate.replicas=2",
    "generate.tensor_parallel=2",
    # Nothing is kept, so the encoders have work for each question.
    "encode.eviction.use=none",
    "deadlines.rank_timeout_s=6",
)
CONSTRAINED = SamplingParams(
    max_tokens=300, temperature=1.2, seed=11, grammar=constraint_from_schema(LIST)
)
LOSSES = (
    # A decision may find a rank gone before the engine gets the exit of its child.
    ("generate-0", 1, signal.SIGKILL, 100, ("killed by SIGKILL", "is gone")),
    ("encode-0", 0, signal.SIGSTOP, -1, ("deadlines.", "was silent")),
)


async def test_groups_of_ranks_equal_one_rank_and_lose_no_token_to_faults(
    configure: Callable[..., Config], engine: Engine
) -> None:
    """A rank of each stage exits or hangs under load; diverging ranks are in `tests/unit/rank`."""
    asks = mixed_asks()
    questions: list[tuple[Ask, SamplingParams | None]] = [(ask, None) for ask in asks]
    for seed, ask in enumerate(asks[:SEEDS]):
        questions.append((ask, msgspec.structs.replace(DRAWN, seed=seed)))
    questions += [(asks[1], CONSTRAINED), (asks[2], CONSTRAINED)]
    alone = [await answer(engine, *each) for each in questions]
    wanted = [(one.token_ids, one.finish_reason) for one in alone]
    drawn = wanted[len(asks) : len(asks) + SEEDS]
    assert len({tuple(tokens) for tokens, _ in drawn}) == SEEDS, "equality proves nothing"
    assert [reason for _, reason in wanted].count("stop") == 2, "the constrained ones"
    async with Engine(configure("nano25", *GROUPS)) as groups:
        for name, rank, number, tokens, reasons in LOSSES:
            before = restarts(groups)
            pid = row(groups, name)["ranks"][rank]["pid"]
            started = [await begin(groups, *each) for each in questions]
            found = await answers_over_a_kill(groups, started, pid, tokens=tokens, number=number)
            assert [(one.token_ids, one.finish_reason) for one in found] == wanted
            assert restarts(groups) == before | {name: before[name] + 1}, "no other was lost"
            reason = row(groups, name)["last_loss"]["reason"]
            assert any(words in reason for words in reasons), reason
        statistics = groups.statistics()
        for stage in ("encode", "generate"):
            busy = [statistics["busy_ms"][f"{stage}-{index}"] for index in range(2)]
            assert min(busy) > 0, busy
        assert statistics["generate"]["preemptions"] > 0, "the KV cache was not small enough"
        await assert_idle(groups)
        every = groups.rank_pids
    assert not any(map(is_alive, every))


def row(engine: Engine, group: str) -> dict[str, Any]:
    """An operator's view of a group."""
    return next(each for each in engine.groups() if each["name"] == group)


def restarts(engine: Engine) -> dict[str, int]:
    return {each["name"]: each["restarts"] for each in engine.groups()}
