from __future__ import annotations

import json
from typing import Any

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, PLAIN, FakeEngine, chat, post
from vsched.api.structured_outputs import constraint_from_schema
from vsched.errors import RequestRefused

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}}
CLOSED = {**SCHEMA, "additionalProperties": False}


def named(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


def test_constraint_from_schema_keeps_the_order_of_properties() -> None:
    grammar = constraint_from_schema(SCHEMA)
    assert json.loads(grammar) == {"json_schema": CLOSED}
    assert grammar.index('"b"') < grammar.index('"a"')


@each_case(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            {"json_schema": CLOSED},
        ),
        ({"response_format": named(strict=True)}, {"json_schema": CLOSED}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": CLOSED}),
        ({"structured_outputs": {"json": True}}, {"json_schema": True}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": CLOSED}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "any"}, {"json_schema": CLOSED}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
    ],
)
@each_case("path", [CHAT, PLAIN])
async def test_every_way_to_ask_for_a_form_reaches_the_engine(
    path: str, fields: dict[str, Any], grammar: dict[str, Any]
) -> None:
    engine = FakeEngine()
    body = chat(**fields) if path == CHAT else {"prompt": "x", **fields}
    assert (await post(engine, path, body)).status == 200
    assert json.loads(engine.sampling.grammar) == grammar
    assert not engine.sampling.is_plain_greedy


@each_case(
    "fields",
    [{"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}],
)
async def test_no_form_is_no_grammar(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    assert (await post(engine, CHAT, chat(**fields))).status == 200
    assert not engine.sampling.grammar


@each_case(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": named(None)}, "response_format"),
        ({"response_format": named(3)}, "response_format.json_schema.schema"),
        ({"response_format": {}}, "response_format.type"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        (
            {"response_format": named(), "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
    ],
)
async def test_bad_forms_are_refused_with_the_parameter(fields: dict[str, Any], param: str) -> None:
    reply = await post(FakeEngine(), CHAT, chat(**fields))
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "Remedy" in reply.error["message"]


async def test_a_grammar_that_the_engine_refuses_names_its_parameter() -> None:
    engine = FakeEngine()
    engine.refusal = RequestRefused("it cannot be used. Remedy: mend it.", code="invalid_grammar")
    reply = await post(engine, CHAT, chat(response_format=named()))
    assert (reply.status, reply.error["param"]) == (400, "response_format")
    assert (reply.error["code"], reply.error["type"]) == (
        "invalid_grammar",
        "invalid_request_error",
    )
