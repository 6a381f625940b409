"""Loading of a checkpoint's tokenizer and chat templates, in the formats of all versions of transformers.

A tokenizer is in `tokenizer.json`, or in files that transformers converts: vocabulary and merges of byte-level BPE, a
SentencePiece or tiktoken model, Mistral's `tekken.json`. Formats that only a checkpoint's own code can read are
refused.

Chat templates are, by precedence, in `processor_config.json`, in `chat_template.json`, in `chat_template.jinja` with
other named ones next to it, or in `tokenizer_config.json`, one or a list with names: the same order as in transformers.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from vsched.errors import CheckpointError
from vsched_workers.checkpoint.files import read_json

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
        f"{TOKENIZER_JSON} is missing, and so are the files that it could be converted from "
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
    from vsched_workers.checkpoint.plain_tokenizer import load_plain

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
        raise CheckpointError.of_limit(
            f"{source} has token ids that the model lacks",
            value=largest,
            limit=vocab_size - 1,
            remedy="use the tokenizer that belongs to this checkpoint",
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
