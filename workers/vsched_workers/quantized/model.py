"""Which products a model gets whose weights are made into fewer bits on loading, and its embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from vsched_workers.quantized.weights import QuantizedWeight, quantize


class LookedUpProduct(Protocol):
    """A product by a weight [out, in] in a few bits, whose rows can be looked up.

    Attributes:
        size_bytes: Bytes of the weight.
    """

    size_bytes: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in]; returns [..., out]."""
        ...

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, as of an embedding; indices int64 [n], returns [n, in]."""
        ...


Made = TypeVar("Made", bound=LookedUpProduct)
MakeProduct = Callable[[QuantizedWeight, torch.Tensor | None], Made]
"""Makes a product from a weight and its bias."""

HEAD_FORMAT = "int8"
"""Of the head and the embedding: four bits there cost more of what a model knows than they save."""


class Quantizer(Generic[Made]):
    """Makes the products of one model.

    Weights are made into fewer bits on the device that products have them on.

    Attributes:
        embedding_bytes: Bytes of an embedding that shares nothing with the head.
    """

    def __init__(self, kind: str, group: int, make: MakeProduct[Made], device: str = "cpu") -> None:
        """Take a format, the inputs of a group or 0, what makes a product, and the device for that."""
        self._kind, self._group, self._make, self._device = kind, group, make, device
        self._tied: Made | None = None
        self.embedding_bytes = 0

    def linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> Made:
        """Return the product by a weight of a layer; what is quantised already stays as it is."""
        if isinstance(weight, torch.Tensor):
            weight = quantize(weight.detach().to(self._device), self._kind, group=self._group)
        return self._make(weight, bias)

    def head(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> Made:
        """Return the product by the output projection: that of the embedding where `embed` found the two tied."""
        if self._tied is not None:
            product, self._tied = self._tied, None
            return product
        assert isinstance(weight, torch.Tensor), "heads are read as they are"
        group = self._group if self._kind == HEAD_FORMAT else 0
        made = quantize(weight.detach().to(self._device), HEAD_FORMAT, group=group)
        return self._make(made, bias)

    def embed(self, embedding: nn.Module, head: torch.Tensor) -> nn.Module:
        """Return an embedding over a quantised weight; one that does more than to look up stays as it is."""
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
    """An embedding that looks rows up in the weight of a product."""

    def __init__(self, product: LookedUpProduct, weight: torch.Tensor) -> None:
        """Take the product, and the weight that it stands for."""
        super().__init__()
        self._product = product
        # For models that ask for its type; to compute with it is an error.
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of token ids [...], [..., hidden]."""
        rows = self._product.rows_of(ids.flatten())
        return rows.view(*ids.shape, rows.shape[1])
