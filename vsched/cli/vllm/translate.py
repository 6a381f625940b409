"""Translate a command line of `vllm serve` to options of `vsched serve`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from typer.core import TyperCommand

from vsched.cli.vllm.flags import FLAGS, SEVERAL, Flag
from vsched.cli.vllm.values import ADAPTERS, API_KEY_VARIABLE, Assignments
from vsched.errors import ConfigError, ConfigProblems

NOTES = "vsched.vllm.notes"
"""Key of the notes in the `meta` of the command's context."""
BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


class Translation(msgspec.Struct, kw_only=True):
    """A translated command line.

    Attributes:
        words: Arguments of `vsched serve`.
        environment: Variables to set.
        notes: A line for each flag without effect or with another meaning.
    """

    words: list[str]
    environment: dict[str, str]
    notes: list[str]


def translate(words: Sequence[str]) -> Translation:
    """Replace vLLM's flags by assignments (`--set`), which come first: options of vsched take precedence.

    Raises:
        ConfigError: With a line for each flag that is refused.
    """
    problems = ConfigProblems()
    assignments: Assignments = {}
    done = Translation(words=[], environment={}, notes=[])
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            done.words += [word, *rest]
            break
        found = _find(word)
        if found is None:
            done.words.append(word)
            continue
        name, flag, negated, values = found
        values += _values(rest, flag.values if not values and not negated else 0)
        with problems.collected():
            new = _apply(name, flag, negated, values, done)
            if ADAPTERS in new:
                new[ADAPTERS] = str(max(int(new[ADAPTERS]), int(assignments.get(ADAPTERS, 0))))
            assignments |= new
    problems.tell()
    sets = [part for key, value in assignments.items() for part in ("--set", f"{key}={value}")]
    done.words[:0] = sets
    return done


def _find(word: str) -> tuple[str, Flag, bool, list[str]] | None:
    """Parse a flag: its name as written, its entry, whether it is negated, and the value after `=`."""
    if not word.startswith("-"):
        return None
    name, equals, value = word.partition("=")
    name = name.replace("_", "-") if name.startswith("--") else name
    name, dot, field = name.partition(".")
    negated = name.startswith("--no-") and name not in BY_NAME
    flag = BY_NAME.get(f"--{name.removeprefix('--no-')}" if negated else name)
    if flag is None or (negated and flag.values):
        return None
    return name + dot + field, flag, negated, [value] if equals else []


def _values(rest: list[str], count: int) -> list[str]:
    """Remove the values of a flag from the front of the remaining words."""
    if count != SEVERAL:
        found, rest[:count] = rest[:count], []
        return found
    found = []
    while rest and not rest[0].startswith("-"):
        found.append(rest.pop(0))
    return found


def _apply(
    name: str, flag: Flag, negated: bool, values: list[str], done: Translation
) -> Assignments:
    """Return the assignments of a flag, and add its notes and variables.

    Raises:
        ConfigError: If it is refused.
    """
    name, dot, field = name.partition(".")
    if dot and values:  # --limit-mm-per-prompt.image 4
        values = [json.dumps({field: _json_or_text(values[0])})]
    if flag.outcome == "refused" and not negated:
        raise ConfigError(f"{name} of vLLM has no counterpart: {flag.note}")
    if flag.values and not values:
        raise ConfigError(f"{name} of vLLM needs a value")
    convert = flag.convert_no if negated else flag.convert
    assignments: Assignments = {}
    if convert is not None:
        try:
            assignments = dict(convert(values))
        except ConfigError as error:
            raise ConfigError(f"{name} of vLLM {error}") from None
    done.notes += _notes(name, flag, negated, assignments)
    if assignments.get("server.api_key_variable") == API_KEY_VARIABLE:
        done.environment[API_KEY_VARIABLE] = values[0]
    return assignments


def _notes(name: str, flag: Flag, negated: bool, assignments: Assignments) -> Iterator[str]:
    if flag.outcome == "refused":
        yield f"{name} of vLLM has no effect: it is always off"
    elif not assignments:
        yield f"{name} of vLLM has no effect: {flag.note or 'it is the default'}"
    elif flag.note and not negated:
        yield f"{name} of vLLM sets {', '.join(assignments)}: {flag.note}"


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class ServeCommand(TyperCommand):
    """`vsched serve`: flags of vLLM are translated before the command line is parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate and parse; the notes are for the command to log."""
        if ctx.resilient_parsing:  # shell completion
            return super().parse_args(ctx, args)
        done = translate(args)
        os.environ.update(done.environment)
        ctx.meta[NOTES] = done.notes
        return super().parse_args(ctx, done.words)
