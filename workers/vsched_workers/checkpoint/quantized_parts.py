"""Quantized linear layers and experts of a model that transformers loads (the generic path).

Transformers maps the names in a checkpoint to modules, and stacks experts of separate tensors in one parameter
[experts, out, in]. The same mapping finds the quantized weights. They are removed from the model on the meta device, so
transformers loads the rest, and read in the format of the checkpoint:

    ...experts.3.gate_proj.weight_packed
                                          ->  ...experts.gate_up_proj, expert 3: outputs of gate, then of up
    ...experts.3.up_proj.weight_packed

A format may also store stacked tensors, as `...experts.gate_up_proj_blocks` [experts, out, ...].
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vsched.errors import CheckpointError
from vsched_workers.checkpoint.weights import ReadTensor, WeightIndex
from vsched_workers.quantized.experts import (
    mixtures,
    parameters_of,
    take_parameter,
    use_dequantized,
    use_quantized,
)
from vsched_workers.quantized.layers import READ_DIRECTLY, QuantizedLinear, stack_outputs
from vsched_workers.quantized.published import read_quantized
from vsched_workers.quantized.schemes import Scheme
from vsched_workers.quantized.weights import QuantizedWeight

_STACKING = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
"""Operations of transformers that stack the tensors of experts, outputs of several above each other."""

_SEPARATE_EXPERTS = "qwen2_moe"
"""Architecture whose names of experts in separate tensors quantizers also write for models with stacked experts."""

_Sources = dict[str, list[str]]
"""Names in the checkpoint by the pattern that transformers recognizes them by; an empty one without conversion."""


@dataclass(frozen=True, slots=True)
class QuantizedParts:
    """The quantized weights of a model, by names of modules.

    Attributes:
        linears: The name in the checkpoint of each layer's weight.
        experts: For each parameter of a mixture of experts, the weights that are stacked in it: a name for all experts,
            or lists of a name for each expert.
    """

    index: WeightIndex
    scheme: Scheme
    linears: Mapping[str, str]
    experts: Mapping[str, Mapping[str, str | Sequence[Sequence[str]]]]

    def remove_from(self, model: Any) -> None:
        """Remove the weights from a model without weights."""
        for name in self.linears:
            model.set_submodule(name, QuantizedLinear(model.get_submodule(name)))
        for name, parameters in self.experts.items():
            for parameter in parameters:
                take_parameter(model.get_submodule(name), parameter)

    def read_into(
        self, model: Any, dtype: torch.dtype, device: str, report: Callable[[float], None]
    ) -> None:
        """Read the weights into a loaded model that lacks them; on a GPU, experts are dequantized.

        Raises:
            CheckpointError: When a tensor is missing or does not match the scheme, or a file is corrupt.
        """
        count, done = len(self.linears) + len(self.experts), 0
        with self.index.opened() as read:
            for name, key in self.linears.items():
                layer = model.get_submodule(name)
                shape = layer.out_features, layer.in_features
                weight = self._read(read, key, shape, dtype)
                layer.quantized = weight.owned() if device == "cpu" else weight.to(device)
                report((done := done + 1) / count)
            for name, parameters in self.experts.items():
                experts = model.get_submodule(name)
                weights = {
                    parameter: [*self._read_experts(read, experts, parameter, sources, dtype)]
                    for parameter, sources in parameters.items()
                }
                if device == "cpu":
                    use_quantized(experts, weights)
                else:
                    use_dequantized(experts, weights, device)
                report((done := done + 1) / count)

    def _read_experts(
        self,
        read: ReadTensor,
        experts: Any,
        parameter: str,
        sources: str | Sequence[Sequence[str]],
        dtype: torch.dtype,
    ) -> Iterator[QuantizedWeight]:
        """Yield the weight of each expert."""
        count, *sides = getattr(experts, parameter).shape
        outputs, inputs = reversed(sides) if experts.is_transposed else sides
        if isinstance(sources, str):
            whole = functools.cache(read)
            for expert in range(count):

                def read_one(name: str, expert: int = expert) -> torch.Tensor | None:
                    found = whole(name)
                    return None if found is None else found[expert]

                yield self._read(read_one, sources, (outputs, inputs), dtype).owned()
            return
        for names in zip(*sources, strict=True):
            shape = outputs // len(names), inputs
            merged = stack_outputs([self._read(read, name, shape, dtype) for name in names])
            if merged is None:
                raise _refused(names[0], "in another format than the weight that is merged with it")
            yield merged

    def _read(
        self, read: ReadTensor, key: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> QuantizedWeight:
        def of_layer(end: str) -> torch.Tensor | None:
            return read(self.scheme.tensor_name(key, end))

        return read_quantized(self.scheme, of_layer, shape, dtype, name=key)


def find_parts(
    model: Any, index: WeightIndex, scheme: Scheme, prefixes: Sequence[str] = ()
) -> QuantizedParts:
    """Find the quantized weights of a model on the meta device; other quantized weights are ignored.

    `prefixes` are the prefixes of its names in the checkpoint, for a part of a model.

    Raises:
        CheckpointError: When another weight of the model is quantized than of linear layers and experts.
    """
    state, modules = model.state_dict(), dict(model.named_modules())
    converters, rename = _conversions(model, state)
    found: dict[str, _Sources] = defaultdict(lambda: defaultdict(list))
    keys = {key for key in map(scheme.weight_name, index.files) if key is not None}
    for key in sorted(keys, key=_in_order):
        prefix = next((each for each in prefixes if key.startswith(each)), "")
        target, pattern = rename(key.removeprefix(prefix))
        if target in state:
            found[target][pattern or ""].append(key)
    stacked = {
        f"{name}.{parameter}" for name, each in mixtures(model) for parameter in parameters_of(each)
    }
    linears: dict[str, str] = {}
    experts: dict[str, dict[str, str | list[list[str]]]] = defaultdict(dict)
    for target, sources in found.items():
        module, _, leaf = target.rpartition(".")
        is_linear = type(modules[module]) is nn.Linear and leaf == "weight"
        is_linear &= module.rpartition(".")[2] not in READ_DIRECTLY
        plain = sources.get("")
        if plain and is_linear and modules[module] is not model.get_output_embeddings():
            linears[module] = plain[0]
        elif plain and target in stacked:
            experts[module][leaf] = plain[0]
        elif target in stacked and _are_stacked(sources, converters, len(state[target])):
            order = converters[next(iter(sources))].source_patterns
            experts[module][leaf] = [sources[pattern] for pattern in order]
        else:
            why = "unlike that of other experts" if target in stacked else ""
            raise _refused(next(iter(sources.values()))[0], why)
    for module, parameters in experts.items():
        if len(parameters) < len(parameters_of(modules[module])):
            (name, *_), *_ = found[f"{module}.{next(iter(parameters))}"].values()
            raise _refused(name, "unlike the other weight of these experts")
    return QuantizedParts(index, scheme, linears, experts)


def check_unquantized(tower: Any, index: WeightIndex, scheme: Scheme) -> None:
    """Check that no weight of a vision tower is quantized.

    Raises:
        CheckpointError: When one is.
    """
    parts = find_parts(tower, index, scheme)
    for name in parts.linears.values():
        raise _refused(name)


def _conversions(
    model: Any, state: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[str], tuple[str, str | None]]]:
    """Return transformers' conversions by the patterns of their sources, and its mapping of a tensor's name.

    The mapping returns the parameter's name, and the pattern of a conversion if there is one.
    """
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions: list[Any] = get_model_conversion_mapping(model)
    conversions += get_checkpoint_conversion_mapping(_SEPARATE_EXPERTS) or []
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters: list[Any] = [each for each in conversions if isinstance(each, WeightConverter)]
    prefix = model.base_model_prefix

    def rename(key: str) -> tuple[str, str | None]:
        found = rename_source_key(key, renamings, converters, prefix, state)
        return found if found[0] in state or key not in state else (key, None)

    return {pattern: each for each in converters for pattern in each.source_patterns}, rename


def _are_stacked(sources: _Sources, converters: Mapping[str, Any], experts: int) -> bool:
    """Return whether a conversion stacks tensors of all experts in the order of a quantized parameter."""
    converter = converters.get(next(iter(sources)))
    if converter is None or {*converter.source_patterns} != {*sources}:
        return False
    operations = [
        (type(each).__name__, getattr(each, "dim", None)) for each in converter.operations
    ]
    return operations in _STACKING and {*map(len, sources.values())} == {experts}


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by their numbers: experts come in their order."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]


def _refused(name: str, why: str = "") -> CheckpointError:
    return CheckpointError(
        f"tensor {name} is quantized{f', {why}' if why else ''}; only linear layers of the language model except the "
        "output projection, and whole experts, may be. Remedy: if the checkpoint is complete, serve one in which it is "
        "not quantized."
    )
