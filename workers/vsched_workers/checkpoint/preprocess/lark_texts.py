"""Lark grammars: preparation of the JSON schemas in them, and the limit of nested rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from vsched.errors import limit_message
from vsched_workers.checkpoint.preprocess.chains import longest_chain
from vsched_workers.checkpoint.preprocess.schemas import SchemaError, rewrite_schema

RULES_MAX = 600
"""Maximum depth of rules through other rules, brackets included: the library recurses (1,000 need 4 MiB of stack)."""
GUIDANCE = "x-guidance"
"""The keyword for options of the grammar library, which a schema in a grammar may have."""
_TOKENS = re.compile(
    r"""
      (?P<comment> (?:\#|//)[^\n]* )
    | (?P<string> "(?:\\.|[^"\\])*" )
    | (?P<regexp> /(?:\\.|[^/\\])+/ )
    | (?P<special> <[^<>\s]+> )
    | (?P<json> %(?:json|regex|llguidance)(?![\w-]) )
    | (?P<definition> (?:^|(?<=\n))[ \t]*+[!?]*+_?[A-Za-z][\w-]*+(?=[^\n:"/]*:) )
    | (?P<name> [?!]*_?[A-Za-z][\w-]* )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)


def rewrite_lark(text: str) -> str:
    """Return a grammar with its JSON schemas rewritten by `rewrite_schema`.

    Raises:
        SchemaError: When a schema cannot be used, or the rules are nested too deep.
    """
    parts: list[str] = []
    depths: dict[str, int] = {}
    references: dict[str, dict[str, int]] = {}
    rule, depth = "", 0
    for kind, part in _tokens(text):
        parts.append(part)
        match kind:
            case "definition":
                rule, depth = part.strip(" \t!?"), 1
                depths.setdefault(rule, 1)
                references.setdefault(rule, {})
            case "name" if rule:
                name = part.strip("!?")
                references[rule][name] = max(references[rule].get(name, 0), depth)
            case "other" if rule and part in "([{":
                depth += 1
                depths[rule] = max(depths[rule], depth)
            case "other" if part in ")]}":
                depth -= 1
    known = {
        rule: {name: at for name, at in held.items() if name in depths}
        for rule, held in references.items()
    }
    chain, names = longest_chain(depths, known)
    if chain > RULES_MAX:
        through = ", ".join(names[:3])
        remedy = "use fewer rules that refer to each other"
        raise SchemaError(
            limit_message(
                f"rules are nested too deep ({through} ...)",
                value=chain,
                limit=RULES_MAX,
                remedy=remedy,
            )
        )
    return "".join(parts)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and text of each token of a grammar, with its JSON schemas rewritten."""
    at = 0
    while match := _TOKENS.match(text, at):
        kind, at = match.lastgroup or "", match.end()
        yield kind, match[0]
        if kind != "json":
            continue
        begin = at + len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
        try:
            value, at = _JSON.raw_decode(text, begin)
        except (ValueError, RecursionError):
            raise SchemaError(f"{match[0]} is not followed by JSON. Remedy: correct it") from None
        yield "value", " " + _written(match[0], value)


def _written(keyword: str, value: Any) -> str:
    if keyword == "%json":
        schema = rewrite_schema(value)
        made = schema if isinstance(schema, dict) else {"allOf": [schema]}
        if isinstance(value, dict) and GUIDANCE in value:
            made[GUIDANCE] = value[GUIDANCE]
        value = made
    return json.dumps(value, ensure_ascii=False)


def _no_number(text: str) -> Any:
    raise ValueError(text)


_JSON = json.JSONDecoder(parse_constant=_no_number)
