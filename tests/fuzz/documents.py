"""Hostile schemas and grammars, and requests with them in every field that takes one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.fuzz.schemas import damaged, random_schema

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
Body = dict[str, Any]


class Document(NamedTuple):
    """A schema, or a text in one of the other grammar languages."""

    kind: str
    value: Any


class Asked(NamedTuple):
    """A request with a document, and the field that contains it."""

    document: Document
    door: str
    path: str
    body: bytes

    @property
    def answers_json(self) -> bool:
        """Return True if complete output is JSON."""
        return self.document.kind == "schema"


def draw_document(rng: random.Random) -> Document:
    """Draw a document; half of them are schemas."""
    (kind,) = rng.choices(tuple(_KINDS), (10, 5, 2, 3, 1))
    return Document(kind, _KINDS[kind](rng))


def draw_asked(rng: random.Random, model: str) -> Asked:
    """Draw a request with a document: mostly for a few tokens, at times for more, to test ranks with it."""
    document = draw_document(rng)
    tokens = rng.choice((1, 2, 4, 4, 8, 8, 16, 64))
    field = "json" if document.kind == "schema" else _FIELDS[document.kind]
    doors: dict[str, tuple[str, Body]] = {
        "guided": (TEXT, {"prompt": "1", f"guided_{field}": document.value}),
        "structured_outputs": (CHAT, {"structured_outputs": {field: document.value}}),
    }
    if document.kind == "schema":
        doors.update(at_doors(document.value, text=rng.random() < 0.3))
    door = rng.choice(list(doors))
    path, fields = doors[door]
    fields["temperature"] = rng.choice((0.0, 1.0, 1.5))
    sent = json.dumps(body_at(path, fields, model=model, tokens=tokens))
    return Asked(document, door, path, sent.encode())


def body_at(path: str, fields: Body, *, model: str, tokens: int) -> Body:
    """Return a request body with these fields, and the further fields that the path requires."""
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    messages = {} if path in {TEXT, RESPONSES} else {"messages": [{"role": "user", "content": "1"}]}
    return {"model": model, limit: tokens, **messages, **fields}


def at_doors(schema: Any, *, text: bool = False) -> dict[str, tuple[str, Body]]:
    """Return the path and the fields of each way to send a schema; with `text`, as JSON text if the field allows it."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters}
    tool = {"type": "function", "function": function}
    named = {"type": "function", "function": {"name": "f"}}
    held = {"type": "json_schema", "name": "s", "schema": schema}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {
        "guided": (TEXT, {"prompt": "1", "guided_json": json.dumps(schema) if text else schema}),
        "structured_outputs": (CHAT, {"structured_outputs": {"json": schema}}),
        "response_format": (CHAT, {"response_format": form}),
        "json_object": (CHAT, {"response_format": {"type": "json_object", "schema": schema}}),
        "tools": (CHAT, {"tools": [tool], "tool_choice": "required"}),
        "named tool": (CHAT, {"tools": [tool], "tool_choice": named}),
        "bare tool": (CHAT, {"tools": [_bare(schema)], "tool_choice": "required"}),
        "responses": (RESPONSES, {"input": "1", "text": {"format": held}}),
        "tools of responses": (
            RESPONSES,
            {"input": "1", "tools": [{"type": "function", **function}], "tool_choice": "required"},
        ),
        "messages": (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        "tools of messages": (
            MESSAGES,
            {"tools": [{"name": "f", "input_schema": parameters}], "tool_choice": {"type": "any"}},
        ),
    }


def _bare(schema: Any) -> Body:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def _schema(rng: random.Random) -> Any:
    """Return a random schema, a damaged one, or one excessive construct."""
    schema: Any = random_schema(rng, 3, edges=True)
    schema["$defs"] = {"shared": random_schema(rng, 1, edges=True)}
    size = rng.choice((2, 10, 60, 400, 1500))
    match rng.randrange(10):
        case 0 | 1 | 2:
            return damaged(schema, rng)
        case 3:  # schemas within schemas
            for _ in range(min(size, 400)):
                schema = _wrapped(rng, schema)
        case 4:  # references to references, perhaps in a circle
            made = {f"d{at}": _wrapped(rng, {"$ref": f"#/$defs/d{at + 1}"}) for at in range(size)}
            made[f"d{size}"] = rng.choice(({"type": "null"}, {"$ref": "#/$defs/d0"}, schema))
            return {"$ref": "#/$defs/d0", "$defs": made}
        case 5:
            held = {f"p{at}": rng.choice(({"type": "string"}, {})) for at in range(size)}
            return {"type": "object", "properties": held, "required": list(held)[::2]}
        case 6:  # alternatives that are compared in pairs
            options = [{"pattern": f"a{at}*b"} for at in range(min(size, 60))]
            return {"allOf": [{rng.choice(("anyOf", "oneOf")): options}] * 12}
        case 7:
            return {"type": "array", "items": schema, "minItems": size, "maxItems": 10**size}
        case 8:
            return {"type": "string", "pattern": _regex(rng), "minLength": size**4}
    return schema


def _wrapped(rng: random.Random, inner: Any) -> dict[str, Any]:
    keyword = rng.choice((*_LISTS, *_ONE, "properties", "patternProperties", "$defs"))
    if keyword in _LISTS:
        return {keyword: [inner, *rng.choice(((), ({"type": "null"},), (True,)))]}
    return {keyword: inner if keyword in _ONE else {"a": inner}}


def _regex(rng: random.Random) -> str:
    """Return a regular expression: a costly one, nested groups, or random syntax."""
    match rng.randrange(4):
        case 0:
            return rng.choice(_COSTLY)
        case 1:
            depth = rng.choice((10, 64, 500, 20_000))
            return "(" * depth + "a|b" + rng.choice((")", ")*", "){2}")) * depth
    atoms = [rng.choice(_ATOMS) for _ in range(rng.choice((1, 3, 8, 400)))]
    return "".join(atom + rng.choice(("", "", "*", "+?", "|", "{2,50}")) for atom in atoms)


def _lark(rng: random.Random) -> str:
    """Return rules in Lark: a chain, or some that use each other, at times damaged."""
    size = rng.choice((1, 3, 8, 300, 3000))
    if rng.random() < 0.3:
        around = rng.choice(("{}", '"a" {}', '{} "a"', "({})*", "({} | {})", "{}?"))
        lines = [f"r{at}: " + around.replace("{}", f"r{at + 1}") for at in range(size)]
        lines.append(f"r{size}: " + rng.choice(('"a"', "r0")))
    else:
        lines = [f"r{at}: {_body(rng, min(size, 30), 3)}" for at in range(min(size, 30))]
    text = (
        "\n".join(["start: r0", *lines, *rng.choices(_STATEMENTS, k=rng.choice((0, 0, 2)))]) + "\n"
    )
    if rng.random() < 0.2:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice('()"/|{~%<\\é\x00') + text[at + 1 :]
    return text


def _body(rng: random.Random, rules: int, depth: int) -> str:
    match rng.randrange(7 if depth else 4):
        case 0 | 1:
            return rng.choice(
                ('"a"', '"b"', '""', '"é"', '"a"i', "<|im_end|>", "<[1-200]>", "[r0]")
            )
        case 2:
            return f"r{rng.randrange(rules)}"
        case 3:
            return "/" + _regex(rng).replace("/", "\\/").replace("\n", "\\n") + "/"
        case 4:
            return f"({_body(rng, rules, depth - 1)} | {_body(rng, rules, depth - 1)})"
        case 5:
            times = rng.choice(("*", "+", "?", "{3,}", "{0,65535}", "~2..9"))
            return f"({_body(rng, rules, depth - 1)}){times}"
    return f"{_body(rng, rules, depth - 1)} {_body(rng, rules, depth - 1)}"


def _gbnf(rng: random.Random) -> str:
    return _lark(rng).replace("start", "root").replace(": ", " ::= ")


def _choice(rng: random.Random) -> Any:
    made = [f"{at:05}" for at in range(rng.choice((0, 1, 50, 3000)))]
    return rng.choice((made, made, [*made, 3], ["a", "a"], ["x" * 60_000], "a"))


_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties", "propertyNames")
_COSTLY = (
    "(a+)+$", "(.*a){20}", "((a*)*)*", "(a?){1000}a{1000}", "((.{1,500}b?){1,500}c?){1,500}", ".*.*.*.*.*.*.*.*x",
    "[ab]*a[ab]{20}", "((a{0,30}){0,30}){0,30}", r"(\p{L}{0,50}){0,50}", "(([a-z]{1,9},){1,99};){1,99}",
    "^" * 2000 + "a", "a*" * 2000, "(a|b)?" * 500, ".{0,60000}", r"^(?!$)(?=.*[A-Z])(?=.*\d).{8,}$",
)  # fmt: skip
_ATOMS = (
    "a", "b", ".", r"\d", r"\W", r"\s", "[a-z]", "[^a-z]", "[^]", "[a-", "[z-a]", r"\p{L}", r"\p{Nope}",
    r"\x{110000}", r"\u00e9", r"\ud800", "é", "\U0001f642", "\x00", r"\b", "^", "$", r"\Z", r"\/", r"\1", "(?=a)",
    "(?<!a)", "(?i)", "(?P<n>a)", "()", "[[:alpha:]]", "[a&&b]", "{", "(", ")", "]", "|", "a{2,1}", "{,3}", "\\",
)  # fmt: skip
_STATEMENTS = (
    "%ignore /[ \\t]+/", '%ignore ""', "%import common.INT", "%declare D", '%override start: "x"', "X: X",
    '%llguidance {"no_forcing": true}', "%llguidance [", '%json {"const": -9223372036854775808}',
    '%regex {"substring_words": "a b c"}', 'start[max_tokens=1, temperature=-1]: "a"', 'x[lazy, stop=""]: /a+/',
)  # fmt: skip
_KINDS: dict[str, Callable[[random.Random], Any]] = {
    "schema": _schema,
    "lark": _lark,
    "gbnf": _gbnf,
    "regex": _regex,
    "choice": _choice,
}
_FIELDS = {"lark": "grammar", "gbnf": "grammar", "regex": "regex", "choice": "choice"}
