"""Loading of a tokenizer by the `tokenizers` library alone, when transformers would give the same.

Transformers takes half a second to import and 25 MB. It may change a tokenizer.json as it loads it: a class may rebuild
the steps before the vocabulary, and tokens named in tokenizer_config.json are added. So a tokenizer is loaded here only
if its class keeps the file or has the steps that the file states, and all named tokens are in it as special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from vsched_workers.checkpoint.files import read_json
from vsched_workers.checkpoint.tokenize import GPT4_SPLIT, first_tokens

AS_STATED = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
"""Classes in transformers that take the file as it is."""
QWEN = frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"})
QWEN_FAMILIES = frozenset({"qwen2_5_vl", "qwen3", "qwen3_vl", "qwen3_vl_moe"})
FAMILIES = QWEN_FAMILIES | {"llama"}
"""Model types for which transformers uses the class that tokenizer_config.json names."""
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Roles of special tokens that templates know, as `bos_token`."""
WITHOUT_EFFECT = frozenset(
    {
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "errors",
        "extra_special_tokens",
        "additional_special_tokens",
        "is_local",
        "local_files_only",
        "model_max_length",
        "padding_side",
        "processor_class",
        "tokenizer_class",
        "added_tokens_decoder",
    }
)
"""Keys that do not change ids, or that are compared with the file."""
OFF = frozenset({"add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"})
"""Keys that change ids unless they are off."""
OTHER_FILES = ("added_tokens.json", "special_tokens_map.json")
"""Files of older checkpoints that name further tokens."""
_QWEN_STEPS: dict[str, Any] = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": GPT4_SPLIT},
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    },
}
"""Steps of Qwen's class in transformers, as in a tokenizer.json."""
_OPTIONS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
"""Options of BPE, all of which it leaves off."""


class PlainTokenizer:
    """A tokenizer with the attributes of transformers' that the preprocessing uses."""

    is_fast = True

    def __init__(self, backend: Tokenizer, special_tokens_map: Mapping[str, str]) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special_tokens_map)
        self.chat_template: str | dict[str, str] | None = None


def load_plain(directory: Path) -> PlainTokenizer | None:
    """Return the checkpoint's tokenizer; None if it is transformers that has to load it."""
    files = ("tokenizer.json", "tokenizer_config.json", "config.json")
    if not all((directory / name).is_file() for name in files):
        return None
    if any((directory / name).is_file() for name in OTHER_FILES):
        return None
    settings = read_json(directory, "tokenizer_config.json")
    family = read_json(directory, "config.json").get("model_type")
    kind = settings.get("tokenizer_class")
    qwen = family in QWEN_FAMILIES and kind in QWEN
    if not (qwen or (family in FAMILIES and kind in AS_STATED)) or not _keeps_ids(settings):
        return None
    try:
        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - the library raises this very class; transformers reports it
        return None
    defaults = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    named = {**(defaults if qwen else {}), **settings}
    if (qwen and not _has_qwen_steps(backend)) or not _has_tokens(backend, named):
        return None
    keys = (f"{role}_token" for role in NAMED)
    return PlainTokenizer(backend, {key: _content(named[key]) for key in keys if named.get(key)})


def _keeps_ids(settings: Mapping[str, Any]) -> bool:
    """Return whether no setting changes ids, apart from named tokens."""
    if isinstance(settings.get("extra_special_tokens"), Mapping):  # further roles for templates
        return False
    return all(
        key in WITHOUT_EFFECT or (key in OFF and not value) or _is_token(key, value)
        for key, value in settings.items()
    )


def _is_token(key: str, value: object) -> bool:
    is_stated = isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)
    return key.removesuffix("_token") in NAMED and (value is None or is_stated)


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[Any]:
    for key, value in settings.items():
        if _is_token(key, value) and value is not None:
            yield value
    for key in ("extra_special_tokens", "additional_special_tokens"):
        yield from settings.get(key) or ()


def _has_tokens(backend: Tokenizer, settings: Mapping[str, Any]) -> bool:
    """Return whether all named tokens are special tokens of the file, and no text begins with one."""
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    if not {_content(token) for token in _named_tokens(settings)} <= special:
        return False
    flags = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
    stated = settings.get("added_tokens_decoder") or {}
    for index, token in stated.items():
        own = added.get(int(index))
        if own is None or any(token[flag] != getattr(own, flag) for flag in flags):
            return False
    plain = backend.truncation is None and backend.padding is None
    return plain and not (OFF & settings.keys() and first_tokens(backend))


def _has_qwen_steps(backend: Tokenizer) -> bool:
    """Return whether the file states the steps of Qwen's class."""
    if not isinstance(backend.model, BPE) or any(getattr(backend.model, key) for key in _OPTIONS):
        return False
    steps = {name: getattr(backend, name) for name in _QWEN_STEPS}
    stated = {name: json.loads(step.__getstate__()) for name, step in steps.items() if step}
    return stated == _QWEN_STEPS
