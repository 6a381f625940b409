"""Tables for the tensor parallelism of a module."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vsched.errors import CheckpointError


class Split(enum.Enum):
    """The dimension of a linear layer that ranks split: outputs, inputs, or the outputs of each of three parts."""

    COLUMN = enum.auto()
    ROW = enum.auto()
    FUSED = enum.auto()


@dataclass(frozen=True)
class Sharing:
    """Tensor parallelism of a module; parts that are not listed are replicated.

    Attributes:
        linears: The linear layers to split, by patterns of their names.
        experts: The mixtures of experts, by a pattern of their names; a rank has whole experts of each.
        absent: Patterns of linear layers that a checkpoint may lack.
        counts: Attributes of modules that count heads, by patterns of the modules' names; divided by the ranks.
        sizes: Entries of the module's part of `config.json` that the number of ranks must divide.
    """

    linears: Mapping[str, Split]
    sizes: Sequence[str]
    counts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    experts: str = ""
    absent: Sequence[str] = ()


class PlanEntry(enum.Enum):
    """Entries of transformers' tensor-parallel plan.

    COLUMN: split the outputs; PACKED: the outputs of two parts (gate and up) each. GATHERED: split the outputs, and
    gather the results. ROW: split the inputs, and sum the results; SPLIT_ROW: the same for replicated inputs. SUMMED:
    sum the results of a module whose weights have their own entries. WHOLE: replicate.
    """

    COLUMN = enum.auto()
    PACKED = enum.auto()
    GATHERED = enum.auto()
    ROW = enum.auto()
    SPLIT_ROW = enum.auto()
    SUMMED = enum.auto()
    WHOLE = enum.auto()


PLAN_STYLES: Mapping[str, PlanEntry] = {
    "all_reduce": PlanEntry.SUMMED,
    "colwise": PlanEntry.COLUMN,
    "colwise_gather_output": PlanEntry.GATHERED,
    "colwise_rep": PlanEntry.GATHERED,
    "mla_kv_a_proj": PlanEntry.WHOLE,
    "moe_tp_experts": PlanEntry.SUMMED,
    "packed_colwise": PlanEntry.PACKED,
    "replicate": PlanEntry.WHOLE,
    "replicated_with_grad_allreduce": PlanEntry.WHOLE,
    "rowwise": PlanEntry.ROW,
    "rowwise_rep": PlanEntry.SPLIT_ROW,
    "rowwise_split_input": PlanEntry.SPLIT_ROW,
}
"""transformers' names of the supported entries."""

KEYS = ("k_proj", "kv_b_proj", "query_key_value", "qkv_proj")
"""Linear layers that compute key heads."""


def parallel_plan(config: Any, family: str) -> dict[str, PlanEntry]:
    """Return transformers' plan for a language model, `base_model_tp_plan`, by patterns of modules and parameters.

    Raises:
        CheckpointError: When there is none, or it has an unsupported entry.
    """
    stated: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not stated:
        raise unshared(family, "transformers has no plan for tensor parallelism of it")
    unknown = sorted({style for style in stated.values() if style not in PLAN_STYLES})
    if unknown:
        raise unshared(family, f"transformers' plan for it has entries {', '.join(unknown)}")
    return {name: PLAN_STYLES[style] for name, style in stated.items()}


def shares_heads(config: Any) -> bool:
    """Return whether the plan splits heads, and thus the KV cache."""
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    return any(
        name.rpartition(".")[2] in KEYS and PLAN_STYLES.get(style) is PlanEntry.COLUMN
        for name, style in plan.items()
    )


def unshared(family: str, why: str) -> CheckpointError:
    """Return the error that ranks cannot share a language model."""
    return CheckpointError(
        f"config.json: model_type {family!r} runs on one rank only: {why}. "
        "Remedy: set generate.tensor_parallel to 1."
    )
