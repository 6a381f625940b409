"""Rendering of chat templates as in transformers, whose import would take half a second and 25 MB of the engine.

Templates come with checkpoints and are untrusted: they run in Jinja's sandbox, with the globals of transformers
(`raise_exception`, `strftime_now`, a bare `dict`, namespaces without private names) and its filter `tojson`. Messages
and arguments are plain JSON values. Tests compare the output with transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message to continue; its blank shows whether the template removes trailing whitespace."""
_FILLED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "template",
    }
)
"""Names that rendering fills itself."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which clients send a message's reasoning; templates read the first, or the second (gpt-oss)."""


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    continue_final_message: bool = False,
    **arguments: Any,
) -> str:
    """Render messages; keys without a value count as missing.

    With `continue_final_message` the text ends with the last message's content.

    Raises:
        TemplateError: When the template rejects the messages.
        ValueError: When there is no message, or none that can be continued.
        TypeError, KeyError, AttributeError: When they do not have the form that the template expects.
    """
    if not messages:
        raise ValueError("there are no messages")
    chat = [_with_reasoning(message) for message in messages]
    arguments = {"tools": None, "documents": None, "add_generation_prompt": False, **arguments}
    compiled = _compiled(template)
    if not continue_final_message:
        return compiled.render(messages=chat, **arguments)
    if arguments["add_generation_prompt"]:
        raise ValueError("a message is either continued or followed by another one")
    last = _tag_end(chat, template)
    return _cut_at_tag(compiled.render(messages=chat, **arguments), last)


@lru_cache
def variables_of(template: str) -> frozenset[str]:
    """Return the free variables of a template, without the arguments of `render_template`."""
    environment = _environment()
    read = jinja2.meta.find_undeclared_variables(environment.parse(template))
    return frozenset(read - environment.globals.keys() - _FILLED)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without empty keys, and its reasoning under the names that templates read."""
    stated = {key: value for key, value in message.items() if value is not None}
    found = next((stated[key] for key in REASONING if key in stated), None)
    return stated if found is None else {"thinking": found, **stated, "reasoning_content": found}


def _tag_end(chat: list[dict[str, Any]], template: str) -> str:
    """Append the tag to the last message, and return its text."""
    value = chat[-1].get("content")
    if value is None:
        raise ValueError("the last message has no content")
    if "content" not in template:
        raise ValueError("the chat template does not read content")
    if not isinstance(value, list):
        chat[-1]["content"] = value + TAG
        return str(value)
    parts = [dict(part) for part in value]
    part = next((part for part in reversed(parts) if "text" in part), None)
    if part is None:
        raise ValueError("the last message has no text")
    text = str(part["text"])
    part["text"] = text + TAG
    chat[-1]["content"] = parts
    return text


def _cut_at_tag(rendered: str, last: str) -> str:
    if TAG.strip() not in rendered or last.strip() not in rendered:
        raise ValueError("the chat template leaves out a part of the last message")
    before, _, after = rendered.rpartition(TAG.strip())
    return before if after.startswith(" ") else before.rstrip()


class _Generation(Extension):
    """Takes the tags `generation` and `endgeneration`, which only mark what a model has written."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> Any:
        """Return the statements between the tags, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _Dictionaries:
    """The global `dict`, without the attributes of the class."""

    def __call__(self, *pairs: Any, **items: Any) -> dict[Any, Any]:
        return dict(*pairs, **items)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """Return a dictionary with these keys."""
        return dict.fromkeys(*arguments)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without private names, which could reach the interpreter's objects."""

    def __init__(*arguments: Any, **items: Any) -> None:  # so that `namespace(self=1)` is allowed
        self, *pairs = arguments
        made = dict(*pairs, **items)
        for name in made:
            _check_public(name)
        jinja2.utils.Namespace.__init__(self, made)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r}: a namespace takes no private names")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; Jinja's own filter escapes characters of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dictionaries(),
        "namespace": _Namespace,
    }
    return environment
