"""Which products a model gets whose weights are made into fewer bits on loading, and its embedding."""

from __future__ import annotations

import torch
from torch import nn

from vsched_workers.backends.cpu.quantized.products import QuantizedProduct
from vsched_workers.quantized.weights import QuantizedWeight, quantize

HEAD_FORMAT = "int8"
"""Of the head and the embedding: four bits there cost more of what a model knows than they save."""


class Quantizer:
    """Makes the products of one model.

    Attributes:
        embedding_bytes: Bytes of an embedding that shares nothing with the head.
    """

    def __init__(self, kind: str, group: int, threads: int) -> None:
        """Take a format, the inputs of a group or 0, and the threads of products."""
        self._kind, self._group, self._threads = kind, group, threads
        self._tied: QuantizedProduct | None = None
        self.embedding_bytes = 0

    def linear(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None
    ) -> QuantizedProduct:
        """Return the product by a weight of a layer; what is quantised already stays as it is."""
        made = weight
        if isinstance(weight, torch.Tensor):
            made = quantize(weight.detach(), self._kind, group=self._group)
        return QuantizedProduct(made, bias, threads=self._threads)

    def head(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None
    ) -> QuantizedProduct:
        """Return the product by the output projection: that of the embedding where `embed` found the two tied."""
        if self._tied is not None:
            product, self._tied = self._tied, None
            return product
        assert isinstance(weight, torch.Tensor), "heads are read as they are"
        group = self._group if self._kind == HEAD_FORMAT else 0
        made = quantize(weight.detach(), HEAD_FORMAT, group=group)
        return QuantizedProduct(made, bias, threads=self._threads)

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

    def __init__(self, product: QuantizedProduct, weight: torch.Tensor) -> None:
        """Take the product, and the weight that it stands for."""
        super().__init__()
        self._product = product
        # For models that ask for its type; to compute with it is an error.
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of token ids [...], [..., hidden]."""
        rows = self._product.rows_of(ids.flatten())
        return rows.view(*ids.shape, rows.shape[1])
