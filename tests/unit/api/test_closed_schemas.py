"""Objects have only the listed properties, unless their schema allows others or has several parts."""

from __future__ import annotations

from typing import Any

from tests.each_case import each_case
from vsched.api.structured_outputs import DEPTH_MAX, closed

INTEGER = {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": INTEGER}}
CLOSED = {**OBJECT, "additionalProperties": False}


@each_case(
    ("schema", "wanted"),
    [
        (OBJECT, CLOSED),
        ({"type": "array", "items": OBJECT}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [OBJECT, INTEGER]}, {"prefixItems": [CLOSED, INTEGER]}),
        ({"anyOf": [OBJECT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [{"$ref": "#/$defs/o"}], "$defs": {"o": OBJECT}},) * 2,
        (
            {"properties": {"properties": OBJECT}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
        ({"additionalProperties": OBJECT}, {"additionalProperties": CLOSED}),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
    ],
)
def test_closed_objects(schema: dict[str, Any], wanted: dict[str, Any]) -> None:
    if "$defs" in wanted:
        wanted = {**wanted, "$defs": {"o": CLOSED}}
    assert closed(schema) == wanted
    assert "additionalProperties" not in OBJECT, "the sent schema is unchanged"


@each_case(
    "schema",
    [
        {},
        {"type": "object"},
        {**OBJECT, "additionalProperties": True},
        {**OBJECT, "patternProperties": {"^x": INTEGER}},
        {**OBJECT, "minProperties": 2},
        {**OBJECT, "required": ["b"]},
        {**OBJECT, "required": "a"},
        {"allOf": [OBJECT, {"properties": {"b": INTEGER}}]},
        {**OBJECT, "allOf": [{"properties": {"b": INTEGER}}]},
        {**OBJECT, "anyOf": [{"properties": {"b": INTEGER}}]},
        {"$ref": "#/$defs/o", "properties": {"b": INTEGER}, "$defs": {"o": OBJECT}},
        {"items": OBJECT, "not": OBJECT},
        {"properties": 3, "items": 4, "anyOf": 5, "$defs": [6]},
        {"const": OBJECT},
    ],
)
def test_schemas_with_further_keywords_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = OBJECT
    for _ in range(DEPTH_MAX - 1):
        schema = {"items": schema}
    assert closed(schema) != schema
    for _ in range(5_000):
        schema = {"items": schema}
    assert closed(schema) is schema
