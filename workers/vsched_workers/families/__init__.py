"""The model families that are supported, one file each; adding one is a file here and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vsched.errors import CheckpointError
from vsched_workers.families.base import Family
from vsched_workers.families.qwen2_5_vl import Qwen25Vl
from vsched_workers.families.qwen3_vl import Qwen3Vl
from vsched_workers.families.qwen3_vl_moe import Qwen3VlMoe

FAMILIES: dict[str, Family] = {
    family.name: family for family in (Qwen25Vl(), Qwen3Vl(), Qwen3VlMoe())
}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that a checkpoint's `config.json` names.

    Raises:
        CheckpointError: When the family is not supported.
    """
    name = config.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise CheckpointError(
            f"config.json: model_type {name!r} is not supported. Supported: {supported}. "
            "Remedy: serve a checkpoint of a supported family."
        )
    return family


__all__ = ["FAMILIES", "Family", "family_of"]
