"""With any source of draft tokens, each client gets the same tokens as without speculative decoding."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from tests.e2e.asking import TEXTS, Answer, Ask, answer, begin, drawn_image
from tests.e2e.conftest import assert_idle
from tests.e2e.losing import answers_over_a_kill
from vsched import Config, Engine, SamplingParams
from vsched.api.structured_outputs import constraint_from_schema
from vsched.errors import ConfigError
from vsched_workers.checkpoint.random_init import make_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="package")

NONE = 'generate.drafting={use="none"}'
LOOKUP = (
    'generate.drafting={use="prompt-lookup", ngram=1, gain_min=0.01, speedup_min=0, pause_steps=4}'
)
MODEL = 'generate.drafting={use="draft-model", tokens=3, gain_min=0, speedup_min=0, running_max=64}'
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
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=48)
DRAWN = SamplingParams(
    temperature=0.4, top_p=0.9, seed=4, max_tokens=48, logprobs=1, ignore_eos=True
)
HELD = SamplingParams(
    temperature=1.2, seed=11, max_tokens=300, grammar=constraint_from_schema(SCHEMA)
)
REPEATED = Ask("one two three one two three " * 6)
ASKS = [
    (REPEATED, GREEDY),
    (Ask(TEXTS[3], [drawn_image(9100)]), DRAWN),
    (REPEATED, HELD),
    (Ask(TEXTS[4]), replace(GREEDY, temperature=0.1, seed=9, frequency_penalty=0.2)),
    (Ask(TEXTS[0], [drawn_image(9101), drawn_image(9102)]), GREEDY),
    (Ask(TEXTS[1]), replace(HELD, temperature=0.0)),
]


def said(found: list[Answer]) -> list[tuple[list[int], str, str | None]]:
    return [(each.token_ids, each.text, each.finish_reason) for each in found]


async def ask_all(engine: Engine) -> list[Answer]:
    return list(await asyncio.gather(*(answer(engine, *each) for each in ASKS)))


def by_model(path: Path) -> tuple[str, ...]:
    return f"generate.draft_model={path}", MODEL


@dataclass(frozen=True)
class Plain:
    """Answers of an engine without drafts, the steps of the constrained answer, and its ledger."""

    found: list[Answer]
    steps: int
    lines: dict[str, int]


def lines_of(engine: Engine) -> dict[str, int]:
    assert engine.ledger is not None
    return {one.line: one.bytes for one in engine.ledger.lines if "generate" in one.owner}


async def constrained_steps(engine: Engine) -> tuple[Answer, int]:
    before = engine.statistics()["generate"]["steps"]
    found = await answer(engine, REPEATED, HELD)
    return found, engine.statistics()["generate"]["steps"] - before


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plain(configure: Callable[..., Config]) -> Plain:
    async with Engine(configure("nano25", NONE)) as engine:
        found = await ask_all(engine)
        assert engine.statistics()["generate"]["tokens_drafted"] == 0
        _, steps = await constrained_steps(engine)
        return Plain(found, steps, lines_of(engine))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        *("lookup", "its own model"),
        pytest.param("another model", marks=pytest.mark.thorough),
        pytest.param("two ranks", marks=pytest.mark.thorough),
    ],
)
async def test_drafts_change_no_answer(
    configure: Callable[..., Config],
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    plain: Plain,
    way: str,
) -> None:
    """Concurrently with too few blocks for all, and through the loss of the ranks; in fewer steps than tokens."""
    settings: tuple[str, ...] = (LOOKUP,)
    if way == "two ranks":
        settings = (LOOKUP, "generate.tensor_parallel=2")
    elif way == "its own model":
        settings = by_model(checkpoints("nano25"))
    elif way == "another model":
        make_checkpoint(str(tmp_path / "other"), "nano25", dtype="float32", seed=1)
        settings = by_model(tmp_path / "other")
    async with Engine(configure("nano25", *settings)) as engine:
        if way.endswith("model"):
            # The draft model's weights have a line of their own, and its KV is included in the KV.
            lines = lines_of(engine)
            assert "draft model" not in plain.lines
            assert lines["draft model"] == lines["weights"] == plain.lines["weights"]
            assert lines["kv"] == 2 * plain.lines["kv"]
        found = await ask_all(engine)
        counts = engine.statistics()["generate"]
        assert said(found) == said(plain.found)
        reported = [[one.logprob for one in each[1].logprobs] for each in (found, plain.found)]
        assert reported[0] == pytest.approx(reported[1], abs=1e-4)
        assert len(reported[0]) == 48
        least = 0 if way == "another model" else 10
        assert counts["drafts_accepted"] > least, "hardly any draft token was accepted"
        assert counts["drafts_accepted"] <= counts["tokens_drafted"]  # equal with its own model
        started = [await begin(engine, *each) for each in ASKS]
        found = await answers_over_a_kill(engine, started, engine.rank_pids[1])
        assert said(found) == said(plain.found)
        await assert_idle(engine)


@pytest.mark.slow
async def test_tokens_forced_by_a_grammar_take_no_steps(engine: Engine, plain: Plain) -> None:
    """By default: the output is the same, and comes in fewer steps."""
    found, steps = await constrained_steps(engine)
    assert said([found]) == said(plain.found[2:3])
    assert steps < 0.9 * plain.steps


async def test_a_draft_model_of_another_vocabulary_is_refused(
    configure: Callable[..., Config], checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoints("nano25"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, another = [key for key in vocabulary if len(key) == 1][5:7]
    vocabulary[one], vocabulary[another] = vocabulary[another], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"generate\.draft_model: it has another vocabulary"):
        async with Engine(configure("nano25", *by_model(other))):
            pass
