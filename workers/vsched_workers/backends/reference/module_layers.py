"""The layers of a language model as transformers' modules run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsched_workers.backends.base import Product
from vsched_workers.batching.packed_step import Images
from vsched_workers.batching.paged_attention import PagedStep, running
from vsched_workers.families.decoder import LogitRule


class ModuleLayers:
    """Transformers' model, run over a packed batch; see `LanguageLayers`."""

    def __init__(
        self,
        model: Any,
        send: Callable[[npt.NDArray[np.int64]], torch.Tensor],
        *,
        axes: bool,
    ) -> None:
        """Take the model; `send` copies row numbers to its device, `axes` is whether it uses mrope."""
        self._model = model
        self._send = send
        self._axes = axes

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the normalized hidden states of the wanted rows, [wanted, hidden]."""
        embeds = self._model.embed_tokens(token_ids)
        options: dict[str, Any] = {}
        if images is not None:
            rows = self._send(images.rows)
            embeds[rows] = images.levels[0]
            if len(images.levels) > 1:
                mask = torch.zeros(1, len(token_ids), dtype=torch.bool, device=embeds.device)
                mask[0, rows] = True
                options["visual_pos_masks"] = mask
                options["deepstack_visual_embeds"] = list(images.levels[1:])
        with running(step):  # not every model passes arguments on to its layers
            out = self._model(
                inputs_embeds=embeds[None],
                position_ids=positions if self._axes else positions[0],
                use_cache=False,
                **options,
            )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden[self._send(wanted)] if len(wanted) < len(hidden) else hidden


class RuledHead:
    """An output projection with divided or soft-capped logits, computed as in transformers."""

    def __init__(self, product: Product, rule: LogitRule) -> None:
        self._product = product
        self._rule = rule

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocabulary] of hidden states [rows, hidden]."""
        logits = self._product(hidden)
        divisor, bound = self._rule
        if divisor is not None:
            logits = logits / divisor
        if bound is not None:
            logits = torch.tanh(logits / bound) * bound
        return logits


def stored_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of the storages of tensors; shared storage, as of tied weights, counts once."""
    kept = {each.untyped_storage().data_ptr(): each for each in tensors}
    return sum(each.untyped_storage().nbytes() for each in kept.values())
