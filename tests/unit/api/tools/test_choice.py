from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, FakeEngine, chat, post
from vsched.api.contract import ApiSettings
from vsched.api.errors import ParameterRefused
from vsched.api.parameters import decode_body
from vsched.api.request_schema import ChatRequest, FunctionTool
from vsched.api.tools.arguments import types_of
from vsched.api.tools.choice import forced_calls, tool_use
from vsched.api.tools.formats import CALL_FORMATS
from vsched.errors import RequestRefused

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": True, **fields}}


TOOLS = [function("f", parameters=SCHEMA, description="Does."), function("g")]
NAMED = {"type": "function", "function": {"name": "g"}}


def use_of(**fields: Any) -> Any:
    request = decode_body(msgspec.json.encode(chat(**fields)), ChatRequest)
    return tool_use(request, ApiSettings(), "<tool_call>")


def test_the_template_gets_what_models_know() -> None:
    assert use_of(tools=TOOLS).shown == [
        {
            "type": "function",
            "function": {"name": "f", "description": "Does.", "parameters": SCHEMA},
        },
        {
            "type": "function",
            "function": {"name": "g", "parameters": {"type": "object", "properties": {}}},
        },
    ]


@each_case(
    ("choice", "shown", "forced", "single"),
    [
        (None, "fg", "", False),
        ("auto", "fg", "", False),
        ("required", "fg", "fg", False),
        (NAMED, "fg", "g", True),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [NAMED]},
            },
            "g",
            "g",
            False,
        ),
    ],
)
def test_tool_choice_selects_the_required_call(
    choice: Any, shown: str, forced: str, single: bool
) -> None:
    use = use_of(tools=TOOLS, tool_choice=choice)
    assert [each.name for each in use.functions] == list(shown)
    assert [each.name for each in use.forced] == list(forced)
    assert use.single is single


def test_parallel_calls_can_be_declined() -> None:
    assert use_of(tools=TOOLS, parallel_tool_calls=False).single
    assert not use_of(tools=TOOLS, parallel_tool_calls=True).single


@each_case(
    "fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "none"}]
)
async def test_without_tools_to_call_nothing_changes(fields: dict[str, Any]) -> None:
    assert use_of(**fields) is None
    engine = FakeEngine()
    assert (await post(engine, CHAT, chat(**fields))).status == 200
    assert engine.calls[0]["prompt"] == "user:hi"


@each_case(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].type"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function(""), function("g")]}, "tools[0].function.name"),
        ({"tools": [function("f"), function("f")]}, "tools[1].function.name"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(parameters=[1])]}, "tools[0].function.parameters"),
        ({"tools": [function(str(index)) for index in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "f"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice",
        ),
    ],
)
async def test_invalid_tools_and_tool_choices_are_refused(
    fields: dict[str, Any], param: str
) -> None:
    reply = await post(FakeEngine(), CHAT, chat(**fields))
    assert reply.status == 400
    assert reply.error["param"] == param
    assert "Remedy" in reply.error["message"]


async def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    reply = await post(FakeEngine(), CHAT, chat(tools=[function(parameters=schema)]))
    assert reply.status == 400
    assert reply.error["param"] == "tools[0].function.parameters"


@each_case("name", ["pythonic", "gemma4", "qwen3-coder"])
def test_unions_that_refer_to_unions_are_expanded_once(name: str) -> None:
    """The paths through them may be exponentially many, or endless."""
    count = 64
    definitions: dict[str, Any] = {
        f"d{index}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{index + 1}"}]} for index in range(count)
    }
    definitions[f"d{count}"] = {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/d0"}]}
    argument = {"$ref": "#/$defs/d0"}
    root = {"type": "object", "properties": {"a": argument}, "$defs": definitions}
    tool = msgspec.convert({"name": "f", "parameters": root}, FunctionTool)
    assert types_of(argument, root) == {"boolean"}
    grammar = forced_calls(CALL_FORMATS[name], [tool], single=True)
    assert ("True" if name == "pythonic" else "true" if name == "gemma4" else "boolean") in grammar


def test_a_union_of_nothing_but_itself_is_refused() -> None:
    definitions = {"d": {"anyOf": [{"$ref": "#/$defs/d"}]}}
    root = {"properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": definitions}
    tool = msgspec.convert({"name": "f", "parameters": root}, FunctionTool)
    with pytest.raises(ParameterRefused, match="Remedy"):
        forced_calls(CALL_FORMATS["pythonic"], [tool], single=True)


@each_case("single", [False, True])
async def test_a_forced_call_is_held_to_the_form_of_the_model(single: bool) -> None:
    engine = FakeEngine()
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": not single}
    assert (await post(engine, CHAT, chat(**fields))).status == 200
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    options = [
        {
            "all": [
                '\n{"name": "f", "arguments": ',
                {"schema": SCHEMA},
                "}\n",
            ]
        },
        {"all": ['\n{"name": "g", "arguments": ', {"schema": empty}, "}\n"]},
    ]
    call: Any = {"all": ["<tool_call>", {"any": options}, "</tool_call>"]}
    start = call if single else {"many": call, "between": "\n"}
    assert msgspec.json.decode(engine.sampling.grammar) == {"calls": {"start": start, "rules": {}}}


async def test_tools_that_cannot_be_compiled_are_reported() -> None:
    engine = FakeEngine()
    engine.refusal = RequestRefused("no", code="invalid_grammar")
    reply = await post(engine, CHAT, chat(tools=TOOLS, tool_choice=NAMED))
    assert (reply.status, reply.error["param"]) == (400, "tools")


async def test_calls_go_before_the_form_of_content_and_not_with_another() -> None:
    engine = FakeEngine()
    form = {"type": "json_object"}
    body = chat(tools=TOOLS, tool_choice="required", response_format=form)
    assert (await post(engine, CHAT, body)).status == 200
    assert "calls" in engine.sampling.grammar
    reply = await post(engine, CHAT, chat(tools=TOOLS, tool_choice=NAMED, guided_regex="a"))
    assert (reply.status, reply.error["param"]) == (400, "guided_regex")
