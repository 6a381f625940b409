"""Whatever ranks draft, whatever happens to them: each client gets the tokens that it would have got without."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import msgspec
import pytest

from tests.e2e.asking import TEXTS, Answer, Ask, answer, begin, drawn_image, read
from tests.e2e.conftest import assert_idle
from tests.patience import until
from vsched import Config, Engine, SamplingParams
from vsched.api.bodies.constraints import constraint_from_schema
from vsched.errors import ConfigError

pytestmark = pytest.mark.asyncio(loop_scope="package")

NONE = 'generate.drafting={use="none"}'
LOOKUP = 'generate.drafting={use="prompt-lookup", ngram=1, gain_min=0.01, pause_steps=4}'
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"count": {"type": "integer", "maximum": 99}, "seen": {"type": "boolean"}},
        "required": ["count", "seen"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 3,
}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=90)
DRAWN = SamplingParams(
    temperature=0.4, top_p=0.9, seed=4, max_tokens=90, logprobs=1, ignore_eos=True
)
HELD = SamplingParams(
    temperature=1.2, seed=11, max_tokens=300, grammar=constraint_from_schema(SCHEMA)
)
REPEATED = Ask("one two three one two three " * 6)
ASKS = [
    (REPEATED, GREEDY),
    (Ask(TEXTS[3], [drawn_image(9100)]), DRAWN),
    (REPEATED, HELD),
    (
        Ask(TEXTS[4]),
        msgspec.structs.replace(GREEDY, temperature=0.1, seed=9, frequency_penalty=0.2),
    ),
    (Ask(TEXTS[0], [drawn_image(9101), drawn_image(9102)]), GREEDY),
    (Ask(TEXTS[1]), msgspec.structs.replace(HELD, temperature=0.0)),
]


def said(found: list[Answer]) -> list[tuple[list[int], str, str | None]]:
    return [(each.token_ids, each.text, each.finish_reason) for each in found]


async def ask_all(engine: Engine) -> list[Answer]:
    return list(await asyncio.gather(*(answer(engine, *each) for each in ASKS)))


@pytest.mark.slow
async def test_drafts_change_no_answer(configure: Callable[..., Config]) -> None:
    """Side by side with too few blocks for all, and through the loss of the ranks; in fewer steps than tokens."""
    async with Engine(configure("nano25", NONE)) as engine:
        plain = await ask_all(engine)
        assert engine.statistics()["generate"]["tokens_drafted"] == 0
    async with Engine(configure("nano25", LOOKUP)) as engine:
        found = await ask_all(engine)
        counts = engine.statistics()["generate"]
        assert said(found) == said(plain)
        told = [[one.logprob for one in each[1].logprobs] for each in (found, plain)]
        assert told[0] == pytest.approx(told[1], abs=1e-4)
        assert len(told[0]) == 90
        assert counts["drafts_accepted"] > 30, "hardly any draft proved right"
        assert counts["drafts_accepted"] < counts["tokens_drafted"]
        begun = [await begin(engine, *each) for each in ASKS]
        await until(lambda: all(one.output_tokens > 4 for one in begun), "answers are under way")
        os.kill(engine.rank_pids[1], signal.SIGKILL)
        await until(lambda: engine.state == "degraded", "the loss is noticed")
        assert said(list(await asyncio.gather(*map(read, begun)))) == said(plain)
        await assert_idle(engine)


@pytest.mark.slow
async def test_what_a_grammar_forces_takes_no_steps(configure: Callable[..., Config]) -> None:
    """By default: the answer is the same, and comes in fewer steps."""
    steps, texts = [], []
    for settings in ((NONE,), ()):
        async with Engine(configure("nano25", *settings)) as engine:
            before = engine.statistics()["generate"]["steps"]
            found = await answer(engine, REPEATED, HELD)
            steps.append(engine.statistics()["generate"]["steps"] - before)
            texts.append((found.text, found.token_ids))
    assert texts[0] == texts[1]
    assert steps[1] < 0.9 * steps[0]


@pytest.mark.slow
async def test_ranks_of_a_group_draft_the_same(configure: Callable[..., Config]) -> None:
    async with Engine(configure("nano25", LOOKUP, "generate.tensor_parallel=2")) as engine:
        await ask_all(engine)
        assert engine.statistics()["generate"]["drafts_accepted"] > 0
        assert not any(group["restarts"] for group in engine.groups())


async def test_drafts_are_refused_where_ranks_cannot_verify_them(
    configure: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vsched_workers.plugin.plugin.verifies_drafts", lambda *_, **__: False)
    with pytest.raises(ConfigError, match=r"generate\.drafting: .* cannot verify drafts"):
        async with Engine(configure("nano25", LOOKUP)):
            pass
