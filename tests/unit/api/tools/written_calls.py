"""Calls in a tool-call format, as its grammar requires."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vsched.api.tools.choice import written_value
from vsched.api.tools.formats import CallFormat, TaggedArguments, ValueArguments


def written_arguments(known: CallFormat, arguments: Mapping[str, Any]) -> str:
    """Write the arguments of a call in the tool-call format."""
    match known.arguments:
        case TaggedArguments() as form:
            parts = [
                f"{form.before}{name}{form.middle}{written_value(form, value)}{form.after}"
                for name, value in arguments.items()
            ]
            return "".join(parts)
        case ValueArguments() as form:
            pairs = [
                f"{name}{form.assign}{written_value(form, value)}"
                for name, value in arguments.items()
            ]
            return f"{form.opening}{form.comma.join(pairs)}{form.closing}"
    return json.dumps(arguments, ensure_ascii=False)


def written_calls(known: CallFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Write calls in the tool-call format, as its grammar requires."""
    texts = [
        f"{known.before}{name}{known.middle}{written_arguments(known, arguments)}{known.after}"
        for name, arguments in calls
    ]
    opening = known.opening + known.first
    closing = known.closing if not known.alone else ""
    if known.shared:
        return f"{opening}{known.between.join(texts)}{closing}"
    return known.between.join(f"{opening}{text}{closing}" for text in texts)
