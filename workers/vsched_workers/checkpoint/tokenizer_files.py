"""A checkpoint's tokenizer and chat templates, in the formats of all versions of transformers.

A tokenizer is in `tokenizer.json`, or in files that transformers converts: vocabulary and merges of byte-level BPE, a
SentencePiece or tiktoken model, Mistral's `tekken.json`. Formats that only a checkpoint's own code can read are
refused.

Transformers takes half a second to import and 25 MB. It may change a tokenizer.json as it loads it: a class may rebuild
the steps before the vocabulary, and tokens named in tokenizer_config.json are added. So a tokenizer is loaded by the
`tokenizers` library alone only if its class keeps the file or has the steps that the file states, and all named tokens
are in it as special tokens.

Chat templates are, by precedence, in `processor_config.json`, in `chat_template.json`, in `chat_template.jinja` with
other named ones next to it, or in `tokenizer_config.json`, one or a list with names: the same order as in transformers.
They are rendered as in transformers, without its import. Templates are untrusted: they run in Jinja's sandbox, with the
globals of transformers (`raise_exception`, `strftime_now`, a bare `dict`, namespaces without private names) and its
filter `tojson`. Messages and arguments are plain JSON values. Tests compare the output with transformers'.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.models import BPE

from vsched.errors import CheckpointError, limit_message
from vsched_workers.checkpoint.files import read_json
from vsched_workers.checkpoint.tokenize import GPT4_SPLIT, first_tokens

logger = logging.getLogger(__name__)

TOKENIZER_JSON = "tokenizer.json"
BPE_FILES = ("vocab.json", "merges.txt")
TEKKEN = "tekken.json"
MODEL_FILES = ("tokenizer.model", "spiece.model", "tiktoken.model")
DEFAULT_TEMPLATE = "default"


def tokenizer_files(directory: Path) -> str:
    """Return the names of the tokenizer's files; check that the packages to convert them are installed.

    Raises:
        CheckpointError: When there is no tokenizer, or none in a supported format.
    """
    if (directory / TOKENIZER_JSON).is_file():
        return TOKENIZER_JSON
    if all((directory / name).is_file() for name in BPE_FILES):
        return " and ".join(BPE_FILES)
    if (directory / TEKKEN).is_file():
        return TEKKEN
    for name in MODEL_FILES:
        if (directory / name).is_file():
            _check_converters(directory / name)
            return name
    own = sorted(file.name for file in directory.glob("*.tiktoken"))
    found = f"found {own[0]}, which only code of the checkpoint reads" if own else "found none"
    raise CheckpointError(
        f"{TOKENIZER_JSON} is missing, and so is what it could be made from "
        f"({' with '.join(BPE_FILES)}, {TEKKEN}, {', '.join(MODEL_FILES)}): {found}. "
        "Remedy: give the directory of a complete checkpoint, or save its tokenizer with transformers."
    )


def _check_converters(file: Path) -> None:
    with file.open("rb") as content:
        is_sentencepiece = content.read(1) == b"\n"  # field 1 of the message, its pieces
    needed = ("sentencepiece", "google.protobuf") if is_sentencepiece else ("tiktoken",)
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        names = " and ".join(name.removeprefix("google.") for name in missing)
        raise CheckpointError(
            f"{TOKENIZER_JSON} is missing, and {file.name} is converted with {names}, not installed here. "
            "Remedy: pip install 'vsched[convert]', or get the checkpoint's tokenizer.json."
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def chat_templates(directory: Path) -> dict[str, str]:
    """Return the chat templates by name; `default` is used unless configured otherwise. Empty if there are none.

    Raises:
        CheckpointError: When a file of them cannot be read.
    """
    templates: dict[str, str] = {}
    if (directory / "tokenizer_config.json").is_file():
        templates |= _named(read_json(directory, "tokenizer_config.json").get("chat_template"))
    files = {
        file.stem: file for file in sorted(directory.glob("additional_chat_templates/*.jinja"))
    }
    if (directory / "chat_template.jinja").is_file():
        files[DEFAULT_TEMPLATE] = directory / "chat_template.jinja"
    if files:
        templates = {name: _text(file) for name, file in files.items()}
    for name in ("chat_template.json", "processor_config.json"):
        if (directory / name).is_file():
            templates |= _named(read_json(directory, name).get("chat_template"))
    return templates


def _named(value: object) -> dict[str, str]:
    """Return templates by name from the value of `chat_template` in a JSON file."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, dict):
        return {str(name): str(text) for name, text in value.items()}
    if isinstance(value, list):
        return {
            str(one["name"]): str(one["template"])
            for one in value
            if isinstance(one, dict) and {"name", "template"} <= one.keys()
        }
    return {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise CheckpointError(
            f"{file.name} cannot be read ({type(error).__name__}). Remedy: download the file again."
        ) from error


def choose_templates(directory: Path, wanted: str) -> str | dict[str, str] | None:
    """Return the template to use, or several for transformers to choose from; None if there is none.

    `wanted` is the name of a template of the checkpoint, or the path of a file; empty for the checkpoint's default.

    Raises:
        CheckpointError: When there is no such template, or the checkpoint has several and no default.
    """
    templates = chat_templates(directory)
    if wanted:
        if wanted in templates:
            return templates[wanted]
        if Path(wanted).is_file():
            return _text(Path(wanted))
        raise CheckpointError(
            f"model.chat_template: {wanted!r} is no file, and no template of the checkpoint "
            f"({', '.join(sorted(templates)) or 'it has none'}). Remedy: name one of them, or a file."
        )
    if templates and DEFAULT_TEMPLATE not in templates:
        raise CheckpointError(
            f"the checkpoint has several chat templates and no default: {', '.join(sorted(templates))}. "
            "Remedy: set model.chat_template to one of them."
        )
    return templates if len(templates) > 1 else templates.get(DEFAULT_TEMPLATE)


def load_tokenizer(
    directory: Path, *, vocab_size: int, chat_template: str, plain: bool = False
) -> Any:
    """Load the tokenizer, with the template of `choose_templates`.

    It is transformers' own, or with `plain` one without transformers if that makes no difference.

    Raises:
        CheckpointError: When it is missing, cannot be loaded, or has tokens outside the model's vocabulary.
    """
    # Not earlier: inspecting a checkpoint needs no tokenizer.

    source = tokenizer_files(directory)
    if source != TOKENIZER_JSON:
        logger.info("the tokenizer is converted from %s; %s loads faster", source, TOKENIZER_JSON)
    tokenizer = load_plain(directory) if plain else None
    if tokenizer is None:
        tokenizer = load_part("AutoTokenizer", directory, "tokenizer")
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"the tokenizer cannot be converted from {source}. "
            "Remedy: get the checkpoint's tokenizer.json, or save it with transformers."
        )
    # Added tokens beyond the model's vocabulary are common, such as an image token in a text model; prompts with one
    # are refused.
    own = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    largest = max(own.values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            limit_message(
                f"{source} has token ids that the model lacks",
                value=largest,
                limit=vocab_size - 1,
                remedy="use the tokenizer that belongs to this checkpoint",
            )
        )
    tokenizer.chat_template = choose_templates(directory, chat_template)
    return tokenizer


def load_part(kind: str, directory: Path, what: str, **options: Any) -> Any:
    """Load a part of the preprocessing with the transformers class `kind`.

    Raises:
        CheckpointError: When it cannot be loaded.
    """
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:
        # Loading parses arbitrary files: every exception means the same to the operator.
        raise CheckpointError(
            f"the {what} cannot be loaded ({type(error).__name__}). "
            "Remedy: give the directory of a complete checkpoint."
        ) from error


TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message to continue; its blank shows whether the template removes trailing whitespace."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which clients send a message's reasoning; templates read the first, or the second (gpt-oss)."""


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    continue_final_message: bool | str = False,
    **arguments: Any,
) -> str:
    """Render messages; keys without a value count as missing.

    With `continue_final_message` the text ends with the last message's content, or with the key that is named.

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
    key = continue_final_message if isinstance(continue_final_message, str) else "content"
    last = _tag_end(chat, key, template)
    return _cut_at_tag(compiled.render(messages=chat, **arguments), last)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without empty keys, and its reasoning under the names that templates read."""
    stated = {key: value for key, value in message.items() if value is not None}
    found = next((stated[key] for key in REASONING if key in stated), None)
    return stated if found is None else {"thinking": found, **stated, "reasoning_content": found}


def _tag_end(chat: list[dict[str, Any]], key: str, template: str) -> str:
    """Append the tag to the last message, under all names of its key, and return its text."""
    value = chat[-1].get(key)
    if value is None:
        raise ValueError(f"the last message has no {key}")
    keys = (
        [name for name in REASONING if chat[-1].get(name) == value] if key in REASONING else [key]
    )
    if not any(name in template for name in keys):
        raise ValueError(f"the chat template does not read {key}")
    if not isinstance(value, list):
        chat[-1].update(dict.fromkeys(keys, value + TAG))
        return str(value)
    parts = [dict(part) for part in value]
    part = next((part for part in reversed(parts) if "text" in part), None)
    if part is None:
        raise ValueError("the last message has no text")
    text = str(part["text"])
    part["text"] = text + TAG
    chat[-1][key] = parts
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
    return environment.from_string(template)


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
