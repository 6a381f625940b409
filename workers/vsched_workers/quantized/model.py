"""Quantization of a model's products and embedding on loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from vsched_workers.quantized.weights import QuantizedWeight, quantize


class LookedUpProduct(Protocol):
    """A product with a quantized weight [out, in], whose rows can be looked up.

    Attributes:
        size_bytes: Bytes of the weight.
    """

    size_bytes: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [..., in]; return [..., out]."""
        ...

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, as for an embedding; indices int64 [n], returns [n, in]."""
        ...


Made = TypeVar("Made", bound=LookedUpProduct)
MakeProduct = Callable[[QuantizedWeight, torch.Tensor | None], Made]
"""Build a product from a weight and its bias."""

HEAD_FORMAT = "int8"
"""Format of the head and the embedding: int4 would cost more accuracy there than it saves."""


class Quantizer(Generic[Made]):
    """Builds the quantized products of one model.

    Weights are quantized on the device of their products.

    Attributes:
        embedding_bytes: Bytes of an embedding that is not tied to the head.
    """

    def __init__(self, kind: str, group: int, make: MakeProduct[Made], device: str = "cpu") -> None:
        """Take a format, the group size or 0, the factory of products, and their device."""
        self._kind, self._group, self._make, self._device = kind, group, make, device
        self._tied: Made | None = None
        self.embedding_bytes = 0

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> Made:
        """Return the product of a layer's weight; a weight that is quantized already is unchanged."""
        if isinstance(weight, torch.Tensor):
            weight = quantize(weight.detach().to(self._device), self._kind, group=self._group)
        return self._make(weight, bias)

    def head(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> Made:
        """Return the product of the output projection; the embedding's if `embed` found the two tied."""
        if self._tied is not None:
            product, self._tied = self._tied, None
            return product
        assert isinstance(weight, torch.Tensor), "heads are read as they are"
        group = self._group if self._kind == HEAD_FORMAT else 0
        made = quantize(weight.detach().to(self._device), HEAD_FORMAT, group=group)
        return self._make(made, bias)

    def embed(self, embedding: nn.Module, head: torch.Tensor) -> nn.Module:
        """Return an embedding with a quantized weight; subclasses of `nn.Embedding` are unchanged."""
        if type(embedding) is not nn.Embedding:
            return embedding
        weight = embedding.weight
        product = self.head(weight, None)
        if weight.data_ptr() == head.data_ptr() and weight.shape == head.shape:
            self._tied = product
        else:
            self.embedding_bytes = product.size_bytes
        return QuantizedEmbedding(product, weight)


class QuantizedEmbedding(nn.Module):
    """An embedding that looks up rows in the weight of a product."""

    def __init__(self, product: LookedUpProduct, weight: torch.Tensor) -> None:
        """Take the product, and its original weight."""
        super().__init__()
        self._product = product
        # For models that read its data type; computing with it is an error.
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [..., hidden] of token ids [...]."""
        rows = self._product.rows_of(ids.flatten())
        return rows.view(*ids.shape, rows.shape[1])
