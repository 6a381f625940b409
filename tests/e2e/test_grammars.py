"""Outputs keep to a grammar, whatever the model prefers, and whatever happens to its ranks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

openai = pytest.importorskip("openai")

from tests.e2e.asking import TEXTS, Ask, answer, begin, drawn_image, read  # noqa: E402
from tests.patience import until  # noqa: E402
from vsched import Config, Engine, SamplingParams  # noqa: E402
from vsched.api.structured_outputs import constraint_from_schema  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="package")

ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 999},
        "kind": {"enum": ["car", "person", "dog"]},
        "seen": {"type": "boolean"},
        "note": {"type": ["string", "null"], "maxLength": 12},
    },
    "required": ["id", "kind", "seen", "note"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 2, "maxItems": 2}
ASK = Ask(TEXTS[1], [drawn_image(8100), drawn_image(8101, (64, 64))])
DRAWN = SamplingParams(
    max_tokens=300, temperature=1.2, seed=11, grammar=constraint_from_schema(LIST)
)
GREEDY = msgspec.structs.replace(DRAWN, temperature=0.0, repetition_penalty=1.2)


def check_list(text: str) -> None:
    found = json.loads(text)
    assert len(found) == 2
    for item in found:
        assert list(item) == ["id", "kind", "seen", "note"]
        assert 1 <= item["id"] <= 999
        assert item["kind"] in {"car", "person", "dog"}
        assert isinstance(item["seen"], bool)
        assert item["note"] is None or len(item["note"]) <= 12


async def chat(client: Any, **options: Any) -> Any:
    return await client.chat.completions.create(
        **{"model": "nano25", "messages": ASK.messages, "max_tokens": 300, "seed": 3, **options}
    )


async def test_chat_keeps_to_a_json_schema(sdk: Any) -> None:
    """Sampled and greedy, many at once together with an unconstrained one."""
    requested = {
        "type": "json_schema",
        "json_schema": {"name": "l", "schema": LIST, "strict": True},
    }
    tasks = [
        chat(
            sdk,
            response_format=requested,
            seed=seed,
            temperature=0.0 if seed == 0 else 1.5,
        )
        for seed in range(6)
    ]
    *held, free = await asyncio.gather(*tasks, chat(sdk, max_tokens=20))
    for reply in held:
        assert reply.choices[0].finish_reason == "stop"
        check_list(reply.choices[0].message.content)
    assert len({reply.choices[0].message.content for reply in held}) > 3
    assert free.choices[0].message.content


async def test_chat_streams_json_and_is_cut_at_its_limit(sdk: Any) -> None:
    options = {"response_format": {"type": "json_object"}, "stream": True}
    chunks = [chunk async for chunk in await chat(sdk, max_tokens=8, **options)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.lstrip().startswith("{")
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"structured_outputs": {"choice": ["left", "right"]}}, {"left", "right"}),
        ({"guided_regex": "ab{2}|c"}, {"abb", "c"}),
        ({"guided_grammar": 'start: "yes" | "no"'}, {"yes", "no"}),
        ({"guided_json": {"enum": [1, "x"]}, "ignore_eos": True}, {"1", '"x"'}),
    ],
)
async def test_plain_completions_keep_to_vllm_s_fields(
    sdk: Any, fields: dict[str, Any], texts: set[str]
) -> None:
    reply = await sdk.completions.create(
        model="nano25", prompt="Which?", max_tokens=40, extra_body=fields
    )
    assert reply.choices[0].text.strip() in texts
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 3}, "guided_regex"),
    ],
)
async def test_bad_forms_are_refused_in_openai_s_form(
    sdk: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="Remedy") as refusal:
        await chat(sdk, extra_body=fields)
    assert (refusal.value.param, refusal.value.code) == (param, "invalid_grammar")


async def test_the_same_seed_gives_the_same_json_alone_and_preempted(engine: Engine) -> None:
    alone = await answer(engine, ASK, DRAWN)
    check_list(alone.text)
    crowd = SamplingParams(max_tokens=110, temperature=0.0, ignore_eos=True)
    older = [await begin(engine, Ask(TEXTS[n], [drawn_image(8200 + n)]), crowd) for n in range(3)]
    held = await begin(engine, ASK, DRAWN)
    found, *_ = await asyncio.gather(read(held), *(read(one) for one in older))
    assert held.times.preemptions > 0, "nothing was tested"
    assert found.token_ids == alone.token_ids
    assert found.finish_reason == "stop"


@pytest.mark.slow
async def test_killed_rank_follows_the_grammar_again(engine: Engine) -> None:
    wanted = [(await answer(engine, ASK, sampling)).token_ids for sampling in (DRAWN, GREEDY)]
    started = [await begin(engine, ASK, sampling) for sampling in (DRAWN, GREEDY)]
    await until(lambda: all(one.output_tokens > 4 for one in started), "answers are running")
    assert all(one.reason is None for one in started), "too late to lose anything"
    os.kill(engine.rank_pids[1], signal.SIGKILL)
    await until(lambda: engine.state == "degraded", "the loss is detected")
    found = await asyncio.gather(*(read(one) for one in started))
    assert [each.token_ids for each in found] == wanted
    for each in found:
        check_list(each.text)
    await until(lambda: engine.state == "ready", "the lost group is back")


@pytest.mark.slow
async def test_ranks_of_a_group_follow_the_same_grammar(configure: Callable[..., Config]) -> None:
    config = configure("nano25", "generate.tensor_parallel=2")
    async with Engine(config) as engine:
        found = await asyncio.gather(*(answer(engine, ASK, each) for each in (DRAWN, GREEDY)))
        for each in found:
            check_list(each.text)
        assert not any(group["restarts"] for group in engine.groups())
