"""Decoder-only language models with a `Decoder` description, by `model_type`.

A model type in this table, with a configuration that fits its description, is served like the families with their own
files: with fused layers on a CPU, and tensor parallelism. All others use the generic path (`generic.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vsched_workers.families.decoder import (
    Decoder,
    Entries,
    LayerNorms,
    NormWeights,
    Windows,
)
from vsched_workers.families.generic import text_config
from vsched_workers.families.qwen_positions import Items
from vsched_workers.families.sharing import Sharing

if TYPE_CHECKING:
    from torch import nn

_GEMMA_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
    weights=NormWeights.PLUS_ONE,
)
_GEMMA_ENTRIES = Entries(
    activation="hidden_activation",
    score_bound="attn_logit_softcapping",
    logit_bound="final_logit_softcapping",
)
_OLMO = Decoder(
    query_norm="q_norm",
    key_norm="k_norm",
    norms_all_heads=True,
    norms=LayerNorms(
        before_attention="",
        after_attention="post_attention_layernorm",
        before_feed_forward="",
        after_feed_forward="post_feedforward_layernorm",
        weights=NormWeights.BEFORE_ROUNDING,
    ),
)

DECODERS: Mapping[str, Decoder] = {
    "cwm": Decoder(windows=Windows.NAMED),
    "exaone4": Decoder(
        windows=Windows.NAMED,
        rotates_by_window=True,
        query_norm="q_norm",
        key_norm="k_norm",
        norms=replace(_OLMO.norms, weights=NormWeights.AFTER_ROUNDING),
    ),
    "gemma": Decoder(norms=LayerNorms(weights=NormWeights.PLUS_ONE)),
    "gemma2": Decoder(windows=Windows.NAMED, norms=_GEMMA_NORMS, entries=_GEMMA_ENTRIES),
    "gemma3_text": Decoder(
        windows=Windows.NAMED,
        frequencies_by_kind=True,
        query_norm="q_norm",
        key_norm="k_norm",
        norms=_GEMMA_NORMS,
        # Its configuration has a soft cap of attention scores, too, but the model ignores it.
        entries=replace(_GEMMA_ENTRIES, score_bound=""),
    ),
    "granite": Decoder(
        entries=Entries(
            rows_factor="embedding_multiplier",
            added_factor="residual_multiplier",
            logit_divisor="logits_scaling",
        )
    ),
    "llama": Decoder(),
    "ministral": Decoder(windows=Windows.NAMED),
    "mistral": Decoder(windows=Windows.ALL),
    "olmo2": _OLMO,
    "olmo3": replace(_OLMO, windows=Windows.NAMED, frequencies_by_kind=True),
    "phi3": Decoder(qkv=("qkv_proj",), gate_up=("gate_up_proj",), windows=Windows.ALL),
    "qwen2": Decoder(windows=Windows.NAMED),
    "qwen3": Decoder(windows=Windows.NAMED, query_norm="q_norm", key_norm="k_norm"),
    "seed_oss": Decoder(),
    "smollm3": Decoder(windows=Windows.NAMED, entries=Entries(rotates="no_rope_layers")),
    "vaultgemma": Decoder(
        windows=Windows.NAMED,
        norms=replace(_GEMMA_NORMS, after_attention="", after_feed_forward=""),
        entries=_GEMMA_ENTRIES,
    ),
}


class TextFamily:
    """A text model with a `Decoder` description; see `LanguageFamily`."""

    flips: tuple[str, ...] = ()
    language_prefixes: tuple[str, ...] = ("model.", "")

    def __init__(self, name: str, decoder: Decoder) -> None:
        """Take the `model_type` and its description."""
        self.name = name
        self.decoder = decoder

    @property
    def language_sharing(self) -> Sharing:
        """Its tensor parallelism; an empty table, which allows one rank only, if not possible."""
        return self.decoder.sharing or Sharing({}, ())

    def model_config(self, path: str) -> Any:
        """Load the configuration object."""
        return text_config(Path(path), self.name)

    def build_language(self, path: str, attention: str) -> nn.Module:
        """Build the language model without its head, on the current default device, uninitialized."""
        from transformers import AutoModel

        model: nn.Module = AutoModel.from_config(
            self.model_config(path), attn_implementation=attention
        )
        return model

    def positions(
        self, config: Any, token_ids: npt.NDArray[np.int32], items: Items
    ) -> tuple[npt.NDArray[np.int64], int]:
        """Return the positions of a prompt: the same on all three axes."""
        return text_positions(token_ids, items)


def text_positions(
    token_ids: npt.NDArray[np.int32], items: Items
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the positions of a prompt, the same on all three axes; images have no special positions."""
    del items
    return np.broadcast_to(np.arange(len(token_ids), dtype=np.int64), (3, len(token_ids))), 0


def text_family(name: str, config: Any) -> TextFamily | None:
    """Return the family for a configuration object; None for the generic path."""
    decoder = DECODERS.get(name)
    return None if decoder is None or decoder.unfit(config) else TextFamily(name, decoder)
