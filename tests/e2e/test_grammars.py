"""Outputs and tool calls keep to a grammar, whatever the model prefers.

Schemas and grammars that crash the grammar library have no effect on other requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from tests.e2e.asking import TEXTS, Ask, drawn_image
from tests.each_case import each_case
from tests.fuzz.documents import CHAT, TEXT, at_doors, body_at
from tests.fuzz.grammars import fuzz_grammars
from tests.patience import PATIENCE_S
from vsched import Engine
from vsched.api.server import RunningServer

pytestmark = pytest.mark.asyncio(loop_scope="package")

ITEM: dict[str, Any] = {
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
DRAWN_DOCUMENTS = 40


def check_item(item: dict[str, Any]) -> None:
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
    form = {"type": "json_schema", "json_schema": {"name": "l", "schema": LIST, "strict": True}}
    tasks = [
        chat(sdk, response_format=form, seed=seed, temperature=0.0 if seed == 0 else 1.5)
        for seed in range(6)
    ]
    *held, free = await asyncio.gather(*tasks, chat(sdk, max_tokens=20))
    for reply in held:
        assert reply.choices[0].finish_reason == "stop"
        one, other = json.loads(reply.choices[0].message.content)
        check_item(one)
        check_item(other)
    assert len({reply.choices[0].message.content for reply in held}) > 3
    assert free.choices[0].message.content


@each_case(
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


SMALL = {"id": ITEM["properties"]["id"], "note": {"type": "string", "maxLength": 9}}
PARAMETERS = ITEM | {"properties": SMALL, "required": list(SMALL)}
TOOL = {"type": "function", "function": {"name": "see", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "see"}}


def check_arguments(arguments: str) -> None:
    found = json.loads(arguments)
    assert list(found) == list(SMALL)
    assert 1 <= found["id"] <= 999
    assert len(found["note"]) <= 9


async def call_tool(client: Any, **options: Any) -> Any:
    messages = [{"role": "user", "content": "What is there?"}]
    return await chat(client, messages=messages, tools=[TOOL], max_tokens=150, **options)


async def test_a_named_function_is_called_with_arguments_that_fit(sdk: Any) -> None:
    replies = await asyncio.gather(
        *(call_tool(sdk, tool_choice=NAMED, seed=seed, temperature=1.2) for seed in range(2))
    )
    for reply in replies:
        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "see")
        check_arguments(call.function.arguments)
    calls = [reply.choices[0].message.tool_calls[0] for reply in replies]
    assert len({call.id for call in calls}) == len({call.function.arguments for call in calls}) == 2


async def test_stream_of_a_required_call_equals_the_response(sdk: Any) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    whole = (await call_tool(sdk, **options)).choices[0].message.tool_calls[0].function
    chunks = [chunk async for chunk in await call_tool(sdk, stream=True, **options)]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == whole.name == "see"
    assert deltas[0].id
    assert len(deltas) > 1, "arguments come as they are generated"
    assert "".join(delta.function.arguments for delta in deltas) == whole.arguments
    check_arguments(whole.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def linked(keyword: str, count: int) -> dict[str, Any]:
    """Return a schema of `count` references, each within this keyword of the one before."""
    references = [{"$ref": f"#/$defs/d{n + 1}"} for n in range(count)]
    inner = [{keyword: one if keyword == "items" else [one]} for one in references]
    defs = {f"d{n}": one for n, one in enumerate(inner)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {"type": "null"}}}


CRASH = {"const": -(2**63)}
CRASHES: list[Any] = [
    {"enum": [1, -(2**64)]},
    {"type": "number", "minimum": -1e300, "maximum": -1e299},
    {"allOf": [{"multipleOf": 49999}, {"multipleOf": 49998}]},
    *(linked(one, 1000) for one in ("prefixItems", "items", "oneOf", "anyOf", "allOf")),
]
CHAIN = "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(3000)) + '\nr3000: "a"\n'
GRAMMARS = [CHAIN, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000]


async def post_hostile(url: str, requests: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Send requests, and check that each response is 200, or a refusal with a remedy."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def post(path: str, fields: dict[str, Any]) -> None:
            body = body_at(path, fields, model="nano25", tokens=4)
            headers = {"content-type": "application/json"}
            reply = await client.post(path, content=json.dumps(body), headers=headers)
            assert reply.status_code in {200, 400, 413}, (path, reply.text)
            if reply.status_code != 200:
                assert "Remedy" in reply.json()["error"]["message"], reply.text

        await asyncio.gather(*(post(*each) for each in requests))


async def test_schemas_and_grammars_that_crash_the_library_end_nothing(
    server: RunningServer, engine: Engine
) -> None:
    """On every endpoint; and drawn ones, of which `python -m tests.fuzz` sends many more."""
    ranks = engine.rank_pids
    requests = [*at_doors(CRASH).values()]
    requests += [(TEXT, {"prompt": "1", "guided_json": each}) for each in CRASHES]
    requests += [(CHAT, {"structured_outputs": {"grammar": each}}) for each in GRAMMARS]
    for first in range(0, len(requests), 8):
        await post_hostile(server.url, requests[first : first + 8])
    counted = await fuzz_grammars(server.url, "nano25", seed=1, count=DRAWN_DOCUMENTS)
    statuses = {status: counted[f"schema: {status}"] for status in (200, 400)}
    assert min(statuses.values()) > DRAWN_DOCUMENTS // 20, counted
    assert counted["plain: 200"]
    assert engine.state == "ready"
    assert engine.rank_pids == ranks
