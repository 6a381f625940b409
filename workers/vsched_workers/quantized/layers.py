"""Linear layers with quantized weights: detection, merging, and quantization on loading.

Quantizing ranks' shares of weights must be equivalent to quantizing whole weights, which is checked first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vsched.errors import ConfigError
from vsched.worker.contract import WorkerSettings
from vsched_workers.parallel.slicing import Cut
from vsched_workers.quantized.schemes import GROUPS, INTEGERS, Scheme
from vsched_workers.quantized.weights import (
    QuantizedWeight,
    RoundGroups,
    merged_weights,
    quantize,
)

READ_DIRECTLY = ("dt_proj", "classifier")
"""Layers that are not called: a Mamba mixer, and the router of LongCat-Flash, use their weight directly."""


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized weight; it computes with the dequantized weight until a backend packs it."""

    def __init__(self, linear: nn.Linear, weight: QuantizedWeight | None = None) -> None:
        """Replace a layer; its bias is kept."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.quantized = weight

    @property
    def weight(self) -> Any:  # type: ignore[override]  # not a tensor
        """The quantized weight; before it is read, a tensor without data, which models may initialize."""
        if self.quantized is None:
            return torch.empty(self.out_features, self.in_features, device="meta")
        return self.quantized

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [..., in]; return [..., out]."""
        assert self.quantized is not None, "it has its weight"
        return functional.linear(rows, self.quantized.dequantized().to(rows.dtype), self.bias)


def find_quantized(module: nn.Module, scheme: Scheme, has: Callable[[str], bool]) -> None:
    """Replace the linear layers below a module, on the meta device, whose weights in the checkpoint are quantized.

    `has` returns whether the checkpoint has a tensor; `fill_module` reads the weights.
    """
    for parent_name, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            full = f"{parent_name}.{name}" if parent_name else name
            if type(child) is nn.Linear and any(has(f"{full}.{end}") for end in scheme.known_by):
                setattr(parent, name, QuantizedLinear(child))


def merged_quantized(linears: Sequence[nn.Linear]) -> QuantizedLinear | None:
    """Merge layers without biases; return None if their formats have none in common, or one is not quantized."""
    weights = [each.quantized for each in linears if isinstance(each, QuantizedLinear)]
    found = [each for each in weights if each is not None]
    merged = stack_outputs(found) if len(found) == len(linears) else None
    if merged is None:
        return None
    shape = nn.Linear(merged.inputs, len(merged), bias=False, device="meta")
    return QuantizedLinear(shape, merged)


def stack_outputs(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Stack the outputs of weights, without rounding; return None if their formats have none in common."""
    if len({each.form for each in weights}) > 1 and {each.kind for each in weights} <= {*INTEGERS}:
        group = math.gcd(*(each.group for each in weights))
        weights = [each.as_int8(group) for each in weights]
    return merged_weights(weights) if len({each.form for each in weights}) == 1 else None


def plain_weight(linear: nn.Linear) -> torch.Tensor:
    """Return the weight of a layer, dequantized if necessary."""
    if isinstance(linear, QuantizedLinear):
        assert linear.quantized is not None, "it has its weight"
        return linear.quantized.dequantized().to(linear.quantized.dtype)
    return linear.weight


def check_groups(cuts: Mapping[str, Cut], settings: WorkerSettings, *, stage: str) -> None:
    """Check that no rank's share of inputs begins or ends within a group, whose scale would differ.

    Raises:
        ConfigError: When one does, with the remedy.
    """
    if not settings.quantizes:
        return
    group = settings.weights_group or GROUPS[settings.weights]
    borders = {
        place
        for cut in cuts.values()
        if cut.dimension == 1
        for span in cut.spans
        for place in span
        if place != cut.whole
    }
    cut_through = sorted(place for place in borders if place % group)
    if cut_through:
        fitting = [each for each in (64, 48, 32, 16) if not any(place % each for place in borders)]
        smaller = f"set {stage}.weights_group to {fitting[0]}, or " if fitting else "set "
        raise ConfigError(
            f"{stage}.weights_group: a rank's inputs begin or end at {cut_through[0]}, within a group of {group}, and "
            f"results would differ from those of one rank. Remedy: {smaller}{stage}.tensor_parallel to 1."
        )


MakeProduct = Callable[[QuantizedWeight, torch.Tensor | None], Any]
"""Build a product from a weight and its bias."""

HEAD_FORMAT = "int8"
"""Format of the head and the embedding: int4 would cost more accuracy there than it saves."""


class Quantizer:
    """Builds the quantized products of one model; a product also returns rows of its weight (`rows_of`).

    Weights are quantized on the device of their products.

    Attributes:
        embedding_bytes: Bytes of an embedding that is not tied to the head.
    """

    def __init__(
        self,
        kind: str,
        group: int,
        make: MakeProduct,
        device: str = "cpu",
        int4: RoundGroups | None = None,
    ) -> None:
        """Take a format, the group size or 0, the factory of products, their device, and `int4` of `quantize`."""
        self._kind, self._group, self._make, self._device = kind, group, make, device
        self._int4 = int4
        self.embedding_bytes = 0

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> Any:
        """Return the product of a layer's weight; a weight that is quantized already is unchanged."""
        if isinstance(weight, torch.Tensor):
            plain = weight.detach().to(self._device)
            weight = quantize(plain, self._kind, group=self._group, int4=self._int4)
        return self._make(weight, bias)

    def head(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> Any:
        """Return the product of the output projection."""
        assert isinstance(weight, torch.Tensor), "heads are read as they are"
        group = self._group if self._kind == HEAD_FORMAT else 0
        made = quantize(weight.detach().to(self._device), HEAD_FORMAT, group=group)
        return self._make(made, bias)

    def embed(self, embedding: nn.Embedding, head: torch.Tensor) -> None:
        """Quantize the weight of an embedding, unless it is tied to the head (see `tie_embedding`)."""
        if not _are_tied(embedding, head):
            product = self.head(embedding.weight, None)
            if _look_up(embedding, product):
                self.embedding_bytes = product.size_bytes


def tie_embedding(embedding: nn.Embedding, head: torch.Tensor, product: Any) -> None:
    """Replace the weight of a tied embedding by the packed head: one copy for both."""
    if _are_tied(embedding, head) and not _look_up(embedding, product):
        embedding.weight.data = head.clone()  # it may lie in a mapped file, to be packed


def _are_tied(embedding: nn.Embedding, head: torch.Tensor) -> bool:
    weight: torch.Tensor | PackedWeightRows = embedding.weight
    if isinstance(weight, PackedWeightRows):
        return False
    return weight.data_ptr() == head.data_ptr() and weight.shape == head.shape


@torch.inference_mode()
def _look_up(embedding: nn.Embedding, product: Any) -> bool:
    """Replace the weight of an embedding by the packed weight of a product; return False, unchanged, on a mismatch.

    Forward methods of subclasses, such as scaled embeddings, still apply. Direct use of the weight is a mismatch.
    """
    kind, weight = type(embedding), embedding.weight
    ids = torch.tensor([0, len(weight) - 1], device=weight.device)
    expected = embedding(ids)
    plain = kind is nn.Embedding
    embedding.__class__ = (
        PackedEmbedding if plain else type(kind.__name__, (kind, PackedEmbedding), {})
    )
    del embedding.weight
    embedding.weight = PackedWeightRows(product, weight)  # type: ignore[assignment]
    try:
        error = (embedding(ids) - expected).abs().max()
        fits = bool(error <= 0.05 * expected.abs().max())
    except (RuntimeError, TypeError, AttributeError):
        fits = False
    if not fits:
        del embedding.weight
        embedding.__class__, embedding.weight = kind, weight
    return fits


class PackedWeightRows:
    """The weight of an embedding, packed for a product: some models read rows of it, its type or its device."""

    def __init__(self, product: Any, weight: torch.Tensor) -> None:
        self._product = product
        self.dtype, self.device, self.shape = weight.dtype, weight.device, weight.shape

    def __getitem__(self, at: Any) -> torch.Tensor:
        ids, *rest = at if isinstance(at, tuple) else (at,)
        rows = self.rows_of(torch.as_tensor(ids, device=self.device))
        return rows[(..., *rest)] if rest else rows

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [..., hidden] of ids [...]."""
        rows: torch.Tensor = self._product.rows_of(ids.flatten())
        return rows.view(*ids.shape, rows.shape[1])


class PackedEmbedding(nn.Embedding):
    """An embedding that looks up rows in the weight of a product."""

    weight: PackedWeightRows  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [..., hidden] of token ids [...]."""
        return self.weight.rows_of(ids)
