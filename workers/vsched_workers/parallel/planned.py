"""Shares a model of any architecture by transformers' own plan for tensor parallelism.

The plan (`base_model_tp_plan`) names modules and parameters, and how ranks share each. Modules are cut in place, on the
meta device to see that the model runs so, and again when weights lie in mapped files, of which a rank then copies its
share alone. What the ranks have is added up, or put together, by hooks, in the order of the ranks.

What the plan does not name, every rank has in full: embeddings, heads, norms.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vsched_workers.families.sharing import PlanEntry, unshared
from vsched_workers.parallel.slicing import Cut, cut_of

if TYPE_CHECKING:
    from vsched_workers.parallel.rank_group import RankGroup

GATE_AND_UP = 2
"""Parts of what is packed."""

_INPUTS = (PlanEntry.ROW, PlanEntry.SPLIT_ROW)


class PlannedRanks:
    """The ranks that share a model. Until they join, each stands in for all: shapes are right, and nothing is sent.

    Attributes:
        cuts: This rank's part of each weight that was cut, by its name in the model.
    """

    def __init__(self, *, ranks: int, rank: int) -> None:
        self.size = ranks
        self.rank = rank
        self.cuts: dict[str, Cut] = {}
        self._group: RankGroup | None = None

    def join(self, group: RankGroup) -> None:
        """Talk with the other ranks from now on."""
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, the same to the bit on each."""
        return tensor if self._group is None else self._group.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last dimensions of all ranks side by side."""
        if self._group is None:
            return torch.cat([tensor] * self.size, dim=-1)
        return self._group.all_gather(tensor)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the last dimension."""
        return tensor.chunk(self.size, dim=-1)[self.rank]


def share_by_plan(
    model: Any, plan: Mapping[str, PlanEntry], family: str, ranks: PlannedRanks
) -> None:
    """Leave a rank its share of a model; `plan` names modules and parameters of its decoder.

    Raises:
        CheckpointError: When a size does not divide by the ranks, or a part is not what its entry is for.
    """
    decoder: nn.Module = model.base_model
    ranks.cuts.clear()
    found = 0
    for name, parameter in list(decoder.named_parameters()):
        entry = plan.get(_pattern(name))
        if entry is not None:
            found += 1
            _cut(decoder, name, parameter, entry, family, ranks)
    for name, module in list(decoder.named_modules()):
        entry = plan.get(_pattern(name))
        if entry in (None, PlanEntry.WHOLE):
            continue
        found += 1
        parent = decoder.get_submodule(name.rpartition(".")[0])
        for owner, at in ((module, name), (parent, name.rpartition(".")[0])):
            _require_named(owner, at, plan, family)
        assert entry is not None
        if entry is PlanEntry.SUMMED:
            module.register_forward_hook(functools.partial(_summed, ranks))
        else:
            _share_linear(module, name, entry, family, ranks)
    if not found:
        raise unshared(family, "transformers' plan names none of its modules")
    within = next(name for name, module in model.named_modules() if module is decoder)
    prefix = f"{within}." if within else ""
    ranks.cuts = {f"{prefix}{name}": cut for name, cut in ranks.cuts.items()}


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _require_named(
    module: nn.Module, name: str, plan: Mapping[str, PlanEntry], family: str
) -> None:
    """Refuse parameters beside what is shared that the plan is silent about: they may be for all heads, or be added."""
    if isinstance(module, nn.Linear):
        return
    for own, _ in module.named_parameters(recurse=False):
        if _pattern(f"{name}.{own}") not in plan:
            raise unshared(family, f"transformers' plan says nothing of {name}.{own}")


def _share_linear(
    module: nn.Module, name: str, entry: PlanEntry, family: str, ranks: PlannedRanks
) -> None:
    if not isinstance(module, nn.Linear):
        raise unshared(family, f"{name} is no linear layer, as transformers' plan has it")
    bias = module.bias
    _cut(module, "weight", module.weight, entry, family, ranks, name=f"{name}.weight")
    if entry in _INPUTS:
        if entry is PlanEntry.SPLIT_ROW:
            module.register_forward_pre_hook(functools.partial(_split, ranks))
        module.bias = None  # type: ignore[assignment]  # how a layer without one has it
        module.register_parameter("bias_of_all", bias)
        module.register_forward_hook(functools.partial(_summed, ranks))
    elif bias is not None:
        _cut(module, "bias", bias, entry, family, ranks, name=f"{name}.bias")
    if entry is PlanEntry.GATHERED:
        module.register_forward_hook(functools.partial(_gathered, ranks))
    module.out_features, module.in_features = module.weight.shape


def _cut(
    owner: nn.Module,
    attribute: str,
    parameter: torch.Tensor,
    entry: PlanEntry,
    family: str,
    ranks: PlannedRanks,
    *,
    name: str = "",
) -> None:
    """Put a rank's part in the place of a parameter: of its inputs, the last dimension, or of its outputs before it."""
    if entry is PlanEntry.WHOLE:
        return
    if entry is PlanEntry.SUMMED:
        raise unshared(family, f"{name or attribute} is no module, as transformers' plan has it")
    parts = GATE_AND_UP if entry is PlanEntry.PACKED else 1
    dimension = parameter.dim() - 1 if entry in _INPUTS else max(parameter.dim() - 2, 0)
    size = parameter.shape[dimension]
    if size % (parts * ranks.size):
        raise unshared(
            family,
            f"{name or attribute} has {size} entries in {parts} parts, which {ranks.size} ranks cannot share equally",
        )
    cut: Cut = cut_of(size, ranks=ranks.size, rank=ranks.rank, dimension=dimension, parts=parts)
    parent, _, own = attribute.rpartition(".")
    ranks.cuts[name or attribute] = cut
    part = nn.Parameter(cut.read(parameter.data), requires_grad=False)
    setattr(owner.get_submodule(parent), own, part)


def _split(ranks: PlannedRanks, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return ranks.part(given[0]), *given[1:]


def _summed(
    ranks: PlannedRanks, module: Any, _: tuple[Any, ...], made: torch.Tensor
) -> torch.Tensor:
    total = ranks.all_reduce(made)
    bias = getattr(module, "bias_of_all", None)
    return total if bias is None else total + bias


def _gathered(
    ranks: PlannedRanks, _: nn.Module, __: tuple[Any, ...], made: torch.Tensor
) -> torch.Tensor:
    return ranks.all_gather(made)
