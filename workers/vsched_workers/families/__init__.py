"""The supported model families, one file each; a new family needs a file here and an entry in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vsched.errors import CheckpointError
from vsched.worker.contract import WorkerSettings
from vsched_workers.families.base import Family
from vsched_workers.families.decoders import DECODERS, TextFamily, text_family
from vsched_workers.families.own_families import OwnQwen25Vl, own_text
from vsched_workers.families.qwen import Qwen3Vl, Qwen3VlMoe, Qwen25Vl, read_settings

LanguageFamily = Family | TextFamily

FAMILIES: dict[str, Family] = {
    family.name: family for family in (Qwen25Vl(), Qwen3Vl(), Qwen3VlMoe())
}


def model_type_of(config: Mapping[str, Any]) -> str:
    """Return the model type of a checkpoint's `config.json`.

    Some checkpoints have a `model_type` unknown to transformers, while `architectures` names a class that it has: Kimi
    K2, for example, is DeepSeek-V3 in all but name. The class then determines the type.
    """
    stated = config.get("model_type")
    name = stated if isinstance(stated, str) else ""
    classes = config.get("architectures")
    if name in FAMILIES or name in DECODERS or not isinstance(classes, list) or not classes:
        return name
    from transformers import CONFIG_MAPPING

    if name in CONFIG_MAPPING:
        return name
    from transformers.models.auto import modeling_auto

    tables = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    known = [family for table in tables for family, made in table.items() if made == classes[0]]
    # Several types may share a class: the one that the class is named after comes first.
    known.sort(
        key=lambda family: not classes[0].lower().startswith(f"{family.replace('_', '')}for")
    )
    return known[0] if known else name


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a checkpoint's `config.json`.

    Raises:
        CheckpointError: When the family is not supported.
    """
    name = model_type_of(config)
    family = FAMILIES.get(name)
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"config.json: model_type {name!r} is not supported. Supported: {supported}. "
            "Remedy: serve a checkpoint of a supported family."
        )
    return family


def family_of_rank(name: str, path: str, settings: WorkerSettings) -> Family:
    """Return the family that a rank runs a checkpoint with, with vsched's own modules where they are used.

    Raises:
        CheckpointError: When the configuration lacks a required entry, or has one of the wrong type.
    """
    family = FAMILIES[name]
    if isinstance(family, Qwen25Vl) and _runs_own_modules(settings):
        try:
            own = read_settings(family, path)
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"config.json holds a value of the wrong type ({error}). "
                "Remedy: download the checkpoint again."
            ) from error
        return family if own is None else OwnQwen25Vl(own)
    return family


def _runs_own_modules(settings: WorkerSettings) -> bool:
    """Return whether a rank runs vsched's own modules: on a CPU, unless attention is transformers' own."""
    return settings.device == "cpu" and settings.attention != "exact"


def language_family(
    name: str, path: str, settings: WorkerSettings | None = None
) -> LanguageFamily | None:
    """Return the family of a checkpoint's language model; None for the generic path.

    With a rank's settings, it is the family that this rank runs it with.

    Raises:
        CheckpointError: When the configuration cannot be read, or has unsupported features.
    """
    if name in FAMILIES:
        return FAMILIES[name] if settings is None else family_of_rank(name, path, settings)
    if name not in DECODERS:
        return None
    if settings is None or _runs_own_modules(settings):
        own = own_text(name, path)
        if own is not None:
            return own
    return text_family(name, TextFamily(name, DECODERS[name]).model_config(path))


__all__ = [
    "FAMILIES",
    "Family",
    "LanguageFamily",
    "OwnQwen25Vl",
    "family_of",
    "family_of_rank",
    "language_family",
    "model_type_of",
]
