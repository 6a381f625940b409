"""The weights of a model in transformers, read from the tensors of a GGUF file in parts.

A part is some rows of a tensor that transformers leaves as it is, an expert, or a whole tensor. Transformers has two
ways to name and rearrange tensors: processors, and for new architectures the conversions of its checkpoints.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

_UNQUANTIZED = ("F32", "F16", "BF16")
_PART_VALUES = 1 << 20
"""Values of a part of rows: more would leave the cache."""

Array = npt.NDArray[Any]


class FilePart(NamedTuple):
    """A part of a weight.

    Attributes:
        blocks: The rows of each tensor as in the file.
        plain: Their values, [rows, inputs].
        values: The values of the weight.
    """

    blocks: Sequence[Array]
    plain: Sequence[torch.Tensor]
    values: torch.Tensor


class _Rules(Protocol):
    """Transformers' rules for the tensors of an architecture."""

    def name_of(self, tensor: str) -> str | None:
        """Return the name of the weight that a tensor belongs to."""
        ...

    def arrange(self, name: str, tensors: Mapping[str, Array]) -> Any:
        """Return the weight of a name from its tensors; the same array if nothing changes."""
        ...


@dataclass(frozen=True, slots=True)
class FileWeight:
    """A weight of a model and its tensors in a file.

    Attributes:
        name: Its name in the model.
        target: The weight in the model, on the meta device.
        tensors: Tensors of a `gguf.GGUFReader`.
        rules: The rules by which they become the weight.
    """

    name: str
    target: torch.Tensor
    tensors: Sequence[Any]
    rules: _Rules

    @property
    def is_quantized(self) -> bool:
        """Whether all tensors are."""
        return all(each.tensor_type.name not in _UNQUANTIZED for each in self.tensors)

    def parts(self) -> Iterator[FilePart]:
        """Yield its parts in order."""
        from gguf import dequantize

        for blocks in self._cut():
            given = [
                np.require(dequantize(each, tensor.tensor_type), requirements="W")
                for each, tensor in zip(blocks, self.tensors, strict=True)
            ]
            names = [tensor.name for tensor in self.tensors]
            arranged = self.rules.arrange(self.name, dict(zip(names, given, strict=True)))
            plain = [torch.from_numpy(each.reshape(-1, each.shape[-1])) for each in given]
            yield FilePart(blocks, plain, torch.as_tensor(arranged))

    def _cut(self) -> Iterator[Sequence[Array]]:
        """Yield the blocks of the tensors for each part."""
        # Slicing a memory map is slow.
        given = [np.asarray(tensor.data) for tensor in self.tensors]
        first = given[0]
        if self._stays():
            rows = first.reshape(-1, first.shape[-1])
            step = max(_PART_VALUES // self.target.shape[-1], 1)
            for start in range(0, len(rows), step):
                yield [rows[start : start + step]]
        elif first.ndim == 3:
            for expert in range(len(first)):
                yield [each[expert : expert + 1] for each in given]
        else:
            yield given

    def _stays(self) -> bool:
        """Whether transformers leaves the tensor as it is, which does not depend on its values.

        Raises:
            ValueError: When the weight would have another shape than in the model.
        """
        shapes, wanted = {each.name: _shape(each) for each in self.tensors}, self.target.shape
        if self.tensors[0].data.ndim == 3:  # experts are rearranged one at a time
            shapes = {name: (1, *shape[1:]) for name, shape in shapes.items()}
            wanted = torch.Size((1, *wanted[1:]))
        some = {name: np.broadcast_to(np.float32(-1), shape) for name, shape in shapes.items()}
        found = self.rules.arrange(self.name, some)
        if [size for size in found.shape if size > 1] != [size for size in wanted if size > 1]:
            raise ValueError(f"{self.name} would be {[*found.shape]}, the model has {[*wanted]}.")
        return any(found is each for each in some.values())


def file_weights(model: nn.Module, reader: Any) -> list[FileWeight]:
    """Return the weights of a model, on the meta device, that are in a file."""
    rules, targets = _rules(model, reader), model.state_dict()
    found: dict[str, list[Any]] = {}
    for tensor in reader.tensors:
        name = rules.name_of(tensor.name)
        if name in targets:
            found.setdefault(name, []).append(tensor)
    return [FileWeight(name, targets[name], each, rules) for name, each in found.items()]


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _rules(model: Any, reader: Any) -> _Rules:
    architecture = str(reader.get_field("general.architecture").contents())
    conversions: Any = importlib.import_module("transformers.integrations.gguf")
    if conversions.is_gguf_arch_supported(architecture):
        return _Conversions(
            model, conversions.get_gguf_conversion_mapping(architecture, model.config)
        )
    return _Processor(model, architecture)


class _Processor:
    """The processor of an architecture."""

    def __init__(self, model: Any, architecture: str) -> None:
        library: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        make = library.TENSOR_PROCESSORS.get(architecture, library.TensorProcessor)
        self._processor = make(config=model.config.to_dict())
        self._names = library.get_gguf_hf_weights_map(model, self._processor)

    def name_of(self, tensor: str) -> str | None:
        # Experts, of which the model has one tensor, are mapped without the end.
        found = self._names.get(tensor) or self._names.get(tensor.removesuffix(".weight"))
        return None if found is None else str(found)

    def arrange(self, name: str, tensors: Mapping[str, Array]) -> Any:
        made: dict[str, Any] = {}
        for tensor, values in tensors.items():
            result = self._processor.process(
                weights=values,
                name=tensor,
                tensor_key_mapping=self._names,
                parsed_parameters={"tensors": made},
            )
            if result.name in self._names:
                made[self._names[result.name]] = result.weights
        return made[name]


class _Conversions:
    """The conversions of a new architecture."""

    def __init__(self, model: Any, conversions: Sequence[Any]) -> None:
        self._model = model
        self._library: Any = importlib.import_module("transformers.core_model_loading")
        self._converters = [each for each in conversions if hasattr(each, "operations")]
        self._renamings = [each for each in conversions if not hasattr(each, "operations")]

    def name_of(self, tensor: str) -> str | None:
        return str(self._rename(tensor)[0])

    def arrange(self, name: str, tensors: Mapping[str, Array]) -> Any:
        patterns = {tensor: self._rename(tensor)[1] for tensor in tensors}
        (first, *_), values = patterns.values(), next(iter(tensors.values()))
        if first is None:
            return values
        converter = next(each for each in self._converters if first in each.source_patterns)
        converter = deepcopy(converter)
        for tensor, pattern in patterns.items():
            given = torch.as_tensor(np.ascontiguousarray(tensors[tensor]))
            converter.add_tensor(name, tensor, pattern, given)
        made = converter.convert(name, model=self._model, config=self._model.config)[name]
        return made[0] if isinstance(made, list) else made

    def _rename(self, tensor: str) -> tuple[str, str | None]:
        """Return the name of the tensor's weight, and the pattern by which a converter takes it."""
        found: tuple[str, str | None] = self._library.rename_source_key(
            tensor, self._renamings, self._converters
        )
        return found
