"""Generation settings of a checkpoint: stop tokens and default sampling parameters.

The stop tokens come from `generation_config.json`, or from `config.json` if it has none, and the tokenizer's EOS
token: some chat models end their turns with a token that only the tokenizer's settings name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vsched.errors import CheckpointError, limit_message
from vsched.types import SamplingDefaults
from vsched_workers.checkpoint.files import read_json

GENERATION_FILE = "generation_config.json"

_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 10.0),
}
"""Bounds that requests are subject to as well."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The relevant part of a tokenizer.json; the rest is skipped."""

    added_tokens: list[_AddedToken] = []


def stop_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the stop tokens, without duplicates; empty if the checkpoint has none.

    Raises:
        CheckpointError: When a file that may name them cannot be read.
    """
    stated = next((ids for table in _tables(directory, config) if (ids := _ids(table))), ())
    return tuple(dict.fromkeys((*stated, *_tokenizer_end(directory))))


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Return the sampling parameters in `generation_config.json`.

    `do_sample` is ignored: a request asks for greedy decoding by temperature 0.

    Raises:
        CheckpointError: When a value is out of bounds.
    """
    table = _generation(directory)
    stated: dict[str, Any] = {}
    for name, (low, high) in _BOUNDS.items():
        value = table.get(name)
        if value is None:
            continue
        kinds = (int,) if name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise CheckpointError(
                limit_message(
                    f"{GENERATION_FILE}: {name} is out of bounds",
                    value=repr(value),
                    limit=f"{low} to {high}",
                    remedy="correct it there, or take it out",
                )
            )
        stated[name] = value
    if stated.get("top_p") == 0:  # the lowest value: greedy decoding
        stated |= {"top_p": 1.0, "top_k": 1}
    if "top_k" in stated:
        stated["top_k"] = max(stated["top_k"], 0)  # -1 means none, too
    return SamplingDefaults(**stated)


def _generation(directory: Path) -> Mapping[str, Any]:
    there = (directory / GENERATION_FILE).is_file()
    return read_json(directory, GENERATION_FILE) if there else {}


def _tables(directory: Path, config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield _generation(directory)
    yield config
    text = config.get("text_config")
    if isinstance(text, Mapping):
        yield text


def _ids(table: Mapping[str, Any]) -> tuple[int, ...]:
    stated = table.get("eos_token_id")
    if isinstance(stated, int):
        return (stated,)
    return tuple(int(token) for token in stated) if isinstance(stated, list) else ()


def _tokenizer_end(directory: Path) -> tuple[int, ...]:
    """Return the id of the tokenizer's EOS token, if its settings name one."""
    if not (directory / "tokenizer_config.json").is_file():
        return ()
    settings = read_json(directory, "tokenizer_config.json")
    named = settings.get("eos_token")
    token = named.get("content") if isinstance(named, Mapping) else named
    added = settings.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        found = [int(key) for key, one in added.items() if _content(one) == token]
    elif (directory / "tokenizer.json").is_file():
        content = (directory / "tokenizer.json").read_bytes()
        try:
            listed = msgspec.json.decode(content, type=_AddedTokens).added_tokens
        except msgspec.MsgspecError:
            listed = []  # loading the tokenizer reports the error
        found = [one.id for one in listed if one.content == token]
    else:
        found = []
    return tuple(found[:1])


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, Mapping) else token
