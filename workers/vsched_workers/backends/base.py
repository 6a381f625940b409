"""Types of what a backend prepares: products, layers, language models, and captured steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vsched.worker.contract import Batch, Sampled
from vsched_workers.batching.paged_attention import PagedStep

if TYPE_CHECKING:
    from vsched_workers.batching.packed_step import Images

Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiply activations [..., in] by a weight; return [..., out]."""

RunModel = Callable[[torch.Tensor, torch.Tensor, PagedStep], torch.Tensor]
"""Run a decode step: token ids [rows] and positions [4, 1, rows] to logits [rows, vocabulary]."""


class LanguageLayers(Protocol):
    """The layers of a language model, run over one packed batch."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
        /,
    ) -> torch.Tensor:
        """Return the normalized hidden states of the wanted rows.

        Shape: token ids int64 [rows]; positions int64 [4, 1, rows], the text position and three mrope axes; `wanted`
        has ascending row numbers, including all decode rows. Returns [wanted or more, hidden]: rows beyond the wanted
        ones are padding at the end.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunnableLanguage:
    """A language model as a backend runs it.

    Attributes:
        layers: From token ids to hidden states, or to logits if the model includes its head.
        head: From hidden states [rows, hidden] to logits [rows, vocabulary], or this rank's part of the vocabulary; the
            identity if `layers` returns logits.
        weights_bytes: Bytes of the weights on the device; tied weights count once.
        apart: Separate layers and head, for a model that includes its head and computes logits of wanted rows only.
    """

    layers: LanguageLayers
    head: Product
    weights_bytes: int
    apart: tuple[LanguageLayers, Product] | None = None


class CapturedSteps(Protocol):
    """Captured decode steps over one KV cache, which are replayed as a whole."""

    def step(self, batch: Batch) -> Sampled | None:
        """Run a step and sample; return None for a batch that must be run layer by layer instead."""
        ...

    def let_others_wait(self) -> None:
        """Make later work outside of captured steps wait for a step in flight, which writes to the KV cache."""
        ...

    def drop_steps(self) -> None:
        """Drop the captured steps: they point into the KV cache."""
        ...
