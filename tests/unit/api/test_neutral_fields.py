from __future__ import annotations

from typing import Any

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, FakeEngine, body_of, post

NEUTRAL: dict[str, Any] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "truncate_prompt_tokens": None,
    "include_reasoning": True,
    "documents": [],
    "kv_transfer_params": {},
    "thinking_token_budget": -1,
    "no_stop_trim": False,
    "separate_reasoning": True,
    "return_hidden_states": False,
    "custom_params": {},
    "routed_dp_rank": None,
    "echo": False,
    "request_id": "mine",
    "rid": "mine",
    "custom_labels": {"team": "a"},
}


@each_case("path", [CHAT, PLAIN])
async def test_fields_of_other_servers_are_accepted_where_they_change_nothing(path: str) -> None:
    body = body_of(path, **NEUTRAL)
    reply = await post(FakeEngine(), path, body)
    assert reply.status == 200, reply.body


@each_case(
    ("fields", "limit"),
    [
        ({"use_beam_search": True}, "value true, limit false"),
        ({"length_penalty": 0.5}, "value 0.5, limit 1"),
        ({"length_penalty": True}, "value true, limit 1"),
        ({"thinking_token_budget": 100}, "value 100, limit -1"),
        ({"documents": [{"text": "x"}]}, "value a list, limit []"),
        ({"custom_params": {"x": "y" * 100}}, "value an object, limit {}"),
        ({"chat_template": "x" * 100}, 'value a text of 100 characters, limit ""'),
        ({"regex": "a+"}, 'value "a+", limit null'),
    ],
)
@each_case("path", [CHAT, PLAIN])
async def test_fields_of_other_servers_are_refused_where_they_would_change_something(
    path: str, fields: dict[str, Any], limit: str
) -> None:
    """With value, limit and remedy, before the request reaches the engine."""
    engine = FakeEngine()
    body = body_of(path, **fields)
    reply = await post(engine, path, body)
    assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
    assert reply.error["param"] in fields
    assert f"{limit}. Remedy: " in reply.error["message"]
    assert engine.calls == []


async def test_suffix_is_refused_with_a_sentence() -> None:
    reply = await post(FakeEngine(), PLAIN, {"prompt": "x", "suffix": "y"})
    assert reply.error["message"] == (
        '`suffix` is not supported with this value: value "y", limit "". '
        "Remedy: leave it out; the models served here only write on from a prompt."
    )
    assert (await post(FakeEngine(), PLAIN, {"prompt": "x", "suffix": None})).status == 200
