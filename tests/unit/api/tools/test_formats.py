from __future__ import annotations

from typing import get_args, get_type_hints

import msgspec

from tests.each_case import each_case
from vsched.api.tools.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    call_format,
    reasoning_format,
)
from vsched.config.sections import ModelConfig


@each_case(
    ("template", "name"),
    [
        ('{%- if tools %}<tools></tools> <tool_call>\\n{\\"name\\": <function-name>', "hermes"),
        ("<tool_call>\n<function=example>", None),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3-coder"),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>", "glm"),
        ("<minimax:tool_call>", "minimax"),
        ('<|tool_call>call:{{ name }}{k:<|"|>v<|"|>}', "gemma4"),
        ("to=functions.{{ name }}<|channel|>commentary json", "harmony"),
        (
            "Put it in the format of [func_name1(params_name1=params_value1...), func_name2(params)]",
            "pythonic",
        ),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}```json", "deepseek"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}", "deepseek-v3.1"),
        ('{{ "[TOOL_CALLS]" + name + "[ARGS]" }}', "mistral"),
        ('{{ "[TOOL_CALLS] [" }}', "mistral-list"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama-json"),
        ("{{ tools }}", None),
        ("", None),
    ],
)
def test_the_template_reports_the_form_of_calls(template: str, name: str | None) -> None:
    known = call_format("auto", template)
    assert known == (CALL_FORMATS[name] if name else None)


def test_the_template_reports_the_form_of_reasoning() -> None:
    assert reasoning_format("auto", "x</think>") == REASONING_FORMATS["think"]
    assert reasoning_format("auto", "[THINK]") == REASONING_FORMATS["mistral"]
    assert reasoning_format("auto", "<|channel>thought") == REASONING_FORMATS["gemma4"]
    assert reasoning_format("auto", "<|channel|>analysis") == REASONING_FORMATS["harmony"]
    assert reasoning_format("auto", "<|user|>x<|end|>") is None
    assert reasoning_format("auto", "") is None
    assert reasoning_format("none", "</think>") is None


def test_settings_name_every_form() -> None:
    """The configuration is a layer below the API and cannot read its table."""
    hints = get_type_hints(ModelConfig)
    assert set(get_args(hints["tool_format"])) == {"auto", *CALL_FORMATS}
    assert set(get_args(hints["reasoning_format"])) == {"auto", "none", *REASONING_FORMATS}
    assert msgspec.convert({"tool_format": "hermes"}, ModelConfig).tool_format == "hermes"
