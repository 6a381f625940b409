"""Convert the values of vLLM's flags to assignments of configuration keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vsched.errors import ConfigError

Assignments = dict[str, str]
Convert = Callable[[Sequence[str]], Assignments]
"""Converts the words after a flag; raises `ConfigError` with the end of a sentence that starts with the flag."""

API_KEY_VARIABLE = "VSCHED_API_KEY"
ADAPTERS = "adapters.count_max"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWERS = "kmgt"


def text(key: str) -> Convert:
    """The value of a key, unchanged."""
    return lambda words: {key: words[0]}


def count(key: str, **special: str) -> Convert:
    """A number, also as `32k` (1,000s) or `32K` (1,024s); `special` maps words to values."""

    def convert(words: Sequence[str]) -> Assignments:
        word = words[0]
        return {key: special[word] if word in special else str(size(word))}

    return convert


def size(word: str) -> int:
    """Number that a word such as 8192, 32k or 1.5m stands for.

    Raises:
        ConfigError: For other words.
    """
    match = _SIZE.fullmatch(word)
    if match is None:
        raise ConfigError(f"needs a number such as 8192, 32k or 32K, not {word!r}")
    number, suffix = match.groups()
    base = 1024 if suffix.isupper() else 1000
    power = _POWERS.index(suffix.lower()) + 1 if suffix else 0
    return int(float(number) * base**power) if "." in number else int(number) * base**power


def choice(key: str, values: Mapping[str, str], *, remedy: str) -> Convert:
    """One of vLLM's names; an empty string leaves the key alone.

    `remedy` ends the error for all other names.
    """

    def convert(words: Sequence[str]) -> Assignments:
        if words[0] not in values:
            raise ConfigError(f"has no counterpart for {words[0]}: {remedy}")
        value = values[words[0]]
        return {key: value} if value else {}

    return convert


def only(*accepted: str, remedy: str) -> Convert:
    """A value that must be one of these and sets nothing."""
    return choice("", dict.fromkeys(accepted, ""), remedy=remedy)


def one_name(key: str, remedy: str) -> Convert:
    """A single value of a flag that takes several."""

    def convert(words: Sequence[str]) -> Assignments:
        if len(words) != 1:
            raise ConfigError(f"has {len(words)} values: {remedy}")
        return {key: words[0]}

    return convert


def json_list(key: str) -> Convert:
    """Several words, or one JSON array."""

    def convert(words: Sequence[str]) -> Assignments:
        if len(words) == 1 and words[0].startswith("["):
            return {key: to_toml(read_json(words[0]))}
        return {key: to_toml([one for word in words for one in word.split(",")])}

    return convert


def device(words: Sequence[str]) -> Assignments:
    """Device of both stages."""
    name = {"cuda": "cuda:0"}.get(words[0], words[0])
    return {"generate.device": name, "encode.device": name}


def pinned_bytes(words: Sequence[str]) -> Assignments:
    """KV cache of a fixed size."""
    return {"generate.memory.use": "pinned", "generate.memory.bytes": str(size(words[0]))}


def image_limit(words: Sequence[str]) -> Assignments:
    """Limit of images from `{"image": 4}`, `{"image": {"count": 4}}` or `image=4,video=0`."""
    word = words[0]
    limits = (
        read_json(word)
        if word.startswith("{")
        else dict(part.partition("=")[::2] for part in word.split(","))
    )
    assignments: Assignments = {}
    for kind, limit in limits.items():
        number = size(str(limit.get("count", 999) if isinstance(limit, dict) else limit))
        if kind == "image":
            assignments["media.images_max"] = str(number)
        elif number:
            raise ConfigError(f"has no counterpart for {kind}: only images are supported; set it 0")
    return assignments


def adapters(words: Sequence[str]) -> Assignments:
    """Adapters to load, `name=path` or JSON objects with `name` and `path`."""
    load = {}
    for word in words:
        if word.startswith("{"):
            entry = read_json(word)
            name, path = entry.get("name", ""), entry.get("path", "")
        else:
            name, _, path = word.partition("=")
        if not name or not path:
            raise ConfigError(f"needs name=path, not {word!r}")
        load[name] = path
    table = ", ".join(f"{to_toml(name)} = {to_toml(path)}" for name, path in load.items())
    return {"adapters.load": f"{{{table}}}", ADAPTERS: str(len(load))}


def api_key(words: Sequence[str]) -> Assignments:
    """The name of the variable; the caller puts the key into it."""
    if len(words) != 1:
        raise ConfigError(
            f"has {len(words)} keys: the API key is one; give tenants their own with "
            "server.tenant_keys_variable"
        )
    return {"server.api_key_variable": API_KEY_VARIABLE}


def to_toml(value: Any) -> str:
    """Format a string or a list of strings as TOML; JSON's form is valid TOML."""
    return json.dumps(value, ensure_ascii=False)


def read_json(word: str) -> Any:
    """Parse JSON.

    Raises:
        ConfigError: If it is not valid.
    """
    try:
        return json.loads(word)
    except ValueError as error:
        raise ConfigError(f"needs JSON: {error}") from None
