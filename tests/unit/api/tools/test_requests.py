"""Tools and choices of them in requests, and calls, results and reasoning in their histories."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from tests.unit.api.fakes import CHAT, accepted, chat, refusal
from vsched.api.chat_messages import ARGUMENTS_CHARACTERS_MAX, split_messages, with_template_calls
from vsched.api.contract import ApiSettings
from vsched.api.errors import ParameterRefused
from vsched.api.parameters import decode_body
from vsched.api.request_schema import ChatRequest, FunctionTool, Message
from vsched.api.tools.arguments import types_of
from vsched.api.tools.choice import forced_calls, tool_use
from vsched.api.tools.formats import CALL_FORMATS
from vsched.media import MediaReference

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": True, **fields}}


TOOLS = [function("f", parameters=SCHEMA, description="Does."), function("g")]
NAMED = {"type": "function", "function": {"name": "g"}}
ALLOWED = {"mode": "required", "tools": [NAMED]}


def use_of(**fields: Any) -> Any:
    request = decode_body(msgspec.json.encode(chat(**fields)), ChatRequest)
    return tool_use(request, ApiSettings(), "<tool_call>")


def test_the_template_gets_name_description_and_parameters_of_tools() -> None:
    bare = {"name": "g", "parameters": {"type": "object", "properties": {}}}
    shown = ({"name": "f", "description": "Does.", "parameters": SCHEMA}, bare)
    assert use_of(tools=TOOLS).shown == [{"type": "function", "function": each} for each in shown]


@each_case(
    ("fields", "shown", "forced", "single"),
    [
        ({"tool_choice": None}, "fg", "", False),
        ({"tool_choice": "auto"}, "fg", "", False),
        ({"tool_choice": "required"}, "fg", "fg", False),
        ({"tool_choice": NAMED}, "fg", "g", True),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}, "g", "g", False),
        ({"parallel_tool_calls": False}, "fg", "", True),
        ({"parallel_tool_calls": True}, "fg", "", False),
    ],
)
def test_choices_of_tools(fields: dict[str, Any], shown: str, forced: str, single: bool) -> None:
    use = use_of(tools=TOOLS, **fields)
    assert [each.name for each in use.functions] == list(shown)
    assert [each.name for each in use.forced] == list(forced)
    assert use.single is single


@each_case(
    "fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "none"}]
)
async def test_without_tools_to_call_nothing_changes(fields: dict[str, Any]) -> None:
    engine = await accepted(CHAT, chat(**fields))
    assert engine.calls[0]["prompt"] == "user:hi"


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
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": not single}
    engine = await accepted(CHAT, chat(**fields))
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    options = [
        {"all": [f'\n{{"name": "{name}", "arguments": ', {"schema": schema}, "}\n"]}
        for name, schema in (("f", SCHEMA), ("g", empty))
    ]
    call: Any = {"all": ["<tool_call>", {"any": options}, "</tool_call>"]}
    start = call if single else {"many": call, "between": "\n"}
    assert msgspec.json.decode(engine.sampling.grammar) == {"calls": {"start": start, "rules": {}}}


async def test_calls_go_before_the_form_of_content_and_not_with_another() -> None:
    form = {"type": "json_object"}
    engine = await accepted(CHAT, chat(tools=TOOLS, tool_choice="required", response_format=form))
    assert "calls" in engine.sampling.grammar
    error = await refusal(CHAT, chat(tools=TOOLS, tool_choice=NAMED, guided_regex="a"))
    assert error["param"] == "guided_regex"


def call(arguments: object, name: str = "add") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def template_messages(*sent: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages as the chat template gets them."""
    messages, _ = split_messages(msgspec.convert(sent, list[Message]))
    return with_template_calls(messages)


@each_case(
    ("sent", "read"),
    [
        ('{"a": [1, "ö"]}', {"a": [1, "ö"]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" {} ", {}),
        (None, {}),
        ("null", {}),
        # Malformed or truncated arguments are the model's, not an error of the client.
        ('{"a": [1', {"INVALID_JSON": '{"a": [1'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a":' * 3000, {"INVALID_JSON": '{"a":' * 3000}),
    ],
)
def test_arguments_reach_the_template_as_an_object(sent: Any, read: dict[str, Any]) -> None:
    """Those of deprecated function calls, too."""
    answer = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"}
    assert template_messages({"role": "assistant", "tool_calls": [call(sent)]}, answer) == [
        {"role": "assistant", "content": "", "tool_calls": [call(read)]},
        answer,
    ]
    deprecated = {"role": "assistant", "content": None, "function_call": call(sent)["function"]}
    assert template_messages(deprecated, {"role": "function", "name": "add", "content": "3"}) == [
        {"role": "assistant", "content": "", "tool_calls": [{**call(read), "id": ""}]},
        {"role": "tool", "content": "3", "name": "add"},
    ]


def texts(*values: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": value} for value in values]


THOUGHT = {"type": "thinking", "thinking": "hm"}


@each_case(
    ("fields", "content", "thought"),
    [
        ({"content": [{"type": "refusal", "refusal": "No."}]}, texts("No."), None),
        ({"content": [{"type": "output_text", "text": "a", "annotations": []}]}, texts("a"), None),
        ({"content": [{"type": "input_text", "text": "a"}, *texts("b")]}, texts("a", "b"), None),
        ({"content": [THOUGHT, *texts("b")]}, texts("b"), "hm"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}]}, [], None),
        ({"role": "user", "content": [THOUGHT]}, texts("hm"), None),
        ({"refusal": "No."}, "No.", None),
        ({"content": "Yes.", "reasoning_content": "Let me see."}, "Yes.", "Let me see."),
        ({"content": "No.", "reasoning": "Hm."}, "No.", "Hm."),
        ({"content": "No.", "reasoning_content": {}}, "No.", None),
        ({"role": "user", "content": "Why?", "reasoning_content": "x"}, "Why?", None),
    ],
)
def test_messages_of_other_apis_and_servers_in_a_history(
    fields: dict[str, Any], content: object, thought: str | None
) -> None:
    """Clients send back responses of other servers and APIs."""
    [message] = template_messages({"role": "assistant", **fields})
    assert message["content"] == content
    assert message.get("reasoning_content") == thought


def test_images_are_taken_as_responses_have_them() -> None:
    part = {"type": "input_image", "image_url": "data:,x", "detail": "auto"}
    sent = [{"role": "user", "content": [part]}]
    _, images = split_messages(msgspec.convert(sent, list[Message]))
    assert images == [MediaReference("data:,x")]


@each_case("text", ["{" + " " * 20_000 + "}", '{"a":' * 40 + " " * 20_000 + "1" + "}" * 40])
async def test_long_arguments_are_decoded_off_the_loop(text: str) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call(text)]}]
    prompt = (await accepted(CHAT, chat(messages=messages))).calls[0]["prompt"]
    assert callable(prompt)  # in the thread that tokenizes
    if text.startswith("{ "):
        assert prompt() == "assistant:"
    else:
        with pytest.raises(ParameterRefused, match="one JSON object"):
            prompt()


async def test_arguments_have_a_limit_together() -> None:
    sent = [call(" " * (ARGUMENTS_CHARACTERS_MAX // 2 + 1))] * 2
    messages = [{"role": "assistant", "content": None, "tool_calls": sent}]
    error = await refusal(CHAT, chat(messages=messages))
    assert f"{ARGUMENTS_CHARACTERS_MAX} characters" in error["message"]
