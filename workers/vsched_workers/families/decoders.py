"""Decoder-only language models with a `Decoder` description, by `model_type`.

Most decoders have the same structure: RMS norms, rotary embedding, grouped-query attention, a gated feed-forward. They
differ in the names of their weights and in a few options. `Decoder` describes both; a backend's computation follows
from it and from the configuration, never from the name of a family.

A model type in the table, with a configuration that fits its description, is served like the families with their own
files: with fused layers on a CPU, and tensor parallelism. All others use the generic path (`generic.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vsched_workers.families.generic import build_model, shorter_window, text_config
from vsched_workers.families.qwen_positions import Items
from vsched_workers.families.sharing import Sharing, Split

if TYPE_CHECKING:
    from torch import nn


SLIDING = "sliding_attention"


class Windows(enum.Enum):
    """The layers with a sliding window: none, all, or those in `layer_types`."""

    NONE = enum.auto()
    ALL = enum.auto()
    NAMED = enum.auto()


class Activation(enum.Enum):
    """The activation of a gated feed-forward."""

    SILU = enum.auto()
    GELU = enum.auto()
    GELU_TANH = enum.auto()


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
"""Their names in configurations."""


class NormWeights(enum.Enum):
    """The rounding of a norm's product with its weights: round the row before it, or after it, also with 1 + weight."""

    AFTER_ROUNDING = enum.auto()
    BEFORE_ROUNDING = enum.auto()
    PLUS_ONE = enum.auto()


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The names of a layer's norms; empty if absent.

    Attributes:
        before_attention: Norm of the input of attention; `before_feed_forward` likewise.
        after_attention: Norm of the output of attention, before the residual sum; `after_feed_forward` likewise.
        weights: The variant of the product with their weights; also of query and key norms.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = ""
    weights: NormWeights = NormWeights.AFTER_ROUNDING


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Names of configuration entries that modify the computation; empty if not supported.

    Attributes:
        activation: Activation of the feed-forward.
        rotates: Flags of the layers with rotary embedding.
        rows_factor: Factor of the embeddings.
        added_factor: Factor of the outputs of attention and feed-forward in the residual sum.
        score_bound: Soft cap of attention scores.
        logit_divisor: Divisor of the logits.
        logit_bound: Soft cap of the logits.
    """

    activation: str = "hidden_act"
    rotates: str = ""
    rows_factor: str = ""
    added_factor: str = ""
    score_bound: str = ""
    logit_divisor: str = ""
    logit_bound: str = ""


class LogitRule(NamedTuple):
    """Division of the logits, followed by soft-capping to a bound; None for neither."""

    divisor: float | None
    bound: float | None


class AttentionKind(NamedTuple):
    """Properties of a layer's attention that may differ between layers.

    Attributes:
        window: Tokens that a row attends to, itself included; None without a sliding window.
        rotates: Whether rotary embedding is applied.
        frequencies: The layer type whose rotary frequencies are used; empty if there is only one set.
    """

    window: int | None
    rotates: bool
    frequencies: str = ""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The structure of a language model: names of modules within a layer, and options.

    Attributes:
        axes: Whether positions are mrope: three axes for images in addition to the text position.
        experts: Whether some layers have a mixture of experts, which is transformers' module, in place of a
            feed-forward.
        attention: The attention module, which contains the modules below.
        qkv: Its query, key and value projections; a single name if they are merged.
        output: Its output projection.
        query_norm: Its norm of query heads; empty if absent.
        key_norm: Its norm of key heads; empty if absent.
        norms_all_heads: Whether these norms extend over all heads of a row.
        feed_forward: The feed-forward module, which contains the modules below.
        gate_up: Its gate and up projections; a single name if they are merged.
        down: Its down projection.
        windows: The layers with a sliding window.
        rotates_by_window: Whether, in a model with sliding windows, only layers with a window rotate.
        frequencies_by_kind: Whether each layer type has its own rotary frequencies.
        norms: The norms of a layer.
        entries: Configuration entries that modify the computation.
    """

    axes: bool = False
    experts: bool = False
    attention: str = "self_attn"
    qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    query_norm: str = ""
    key_norm: str = ""
    norms_all_heads: bool = False
    feed_forward: str = "mlp"
    gate_up: Sequence[str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    windows: Windows = Windows.NONE
    rotates_by_window: bool = False
    frequencies_by_kind: bool = False
    norms: LayerNorms = LayerNorms()
    entries: Entries = Entries()

    def unfit(self, config: Any) -> str:
        """Return an unsupported feature in a configuration, in the plural; empty if this structure applies."""
        if getattr(config, "is_heterogeneous", False):
            return "layers of different sizes"
        if self.windows is not Windows.NAMED and SLIDING in _kinds(config):
            return "sliding windows in some layers only"
        if getattr(config, self.entries.activation, None) not in ACTIVATIONS:
            return "other activations"
        if getattr(config, "use_bidirectional_attention", None):
            return "bidirectional attention"
        rope = getattr(config, "rope_parameters", None) or {}
        several = [each for each in rope.values() if isinstance(each, Mapping)]
        if several and not self.frequencies_by_kind:
            return "several rotary embeddings"
        if any(each.get("partial_rotary_factor", 1.0) != 1.0 for each in (rope, *several)):
            return "partial rotary embeddings"
        if head_dim(config) % 2:
            return "odd head sizes"
        return ""

    def activation(self, config: Any) -> Activation:
        """Return the activation of the gate."""
        return ACTIVATIONS[getattr(config, self.entries.activation)]

    @property
    def adds_plainly(self) -> bool:
        """Whether residual sums are plain, with the usual two norms per layer."""
        norms = self.norms
        return (
            bool(norms.before_attention and norms.before_feed_forward)
            and not (norms.after_attention or norms.after_feed_forward)
            and norms.weights is NormWeights.AFTER_ROUNDING
            and not self.entries.added_factor
        )

    def score_bound(self, config: Any) -> float | None:
        """Return the soft cap of attention scores; None without one."""
        return _number(config, self.entries.score_bound)

    def rows_factor(self, config: Any) -> float:
        """Return the factor of the embeddings."""
        return _number(config, self.entries.rows_factor) or 1.0

    def added_factor(self, config: Any) -> float:
        """Return the factor of outputs in the residual sum."""
        return _number(config, self.entries.added_factor) or 1.0

    def logit_rule(self, config: Any) -> LogitRule | None:
        """Return the modification of the logits; None without one."""
        divisor = _number(config, self.entries.logit_divisor)
        bound = _number(config, self.entries.logit_bound)
        return None if divisor is None and bound is None else LogitRule(divisor, bound)

    def kinds(self, config: Any) -> list[AttentionKind]:
        """Return the attention properties of each layer."""
        count = config.num_hidden_layers
        window = None if self.windows is Windows.NONE else shorter_window(config)
        windows = [window] * count
        if self.windows is Windows.NAMED:
            windows = [window if kind == SLIDING else None for kind in _kinds(config)] or windows
        stated = self.entries.rotates
        rotates = getattr(config, stated) if stated else [True] * count
        if self.rotates_by_window and getattr(config, "sliding_window", None) is not None:
            rotates = [kind == SLIDING for kind in _kinds(config)]
        names = _kinds(config) if self.frequencies_by_kind else [""] * count
        return [
            AttentionKind(window, bool(turns), name)
            for window, turns, name in zip(windows, rotates, names, strict=True)
        ]

    @property
    def sharing(self) -> Sharing | None:
        """Its tensor parallelism; None if not possible, as for merged linear layers."""
        if self.experts or self.norms_all_heads or len(self.qkv) != 3 or len(self.gate_up) != 2:
            return None
        return usual_sharing(self)


def usual_sharing(decoder: Decoder) -> Sharing:
    """Return the tensor parallelism of a decoder with separate projections."""
    columns = [f"{decoder.attention}.{name}" for name in decoder.qkv]
    columns += [f"{decoder.feed_forward}.{name}" for name in decoder.gate_up]
    rows = (
        f"{decoder.attention}.{decoder.output}",
        f"{decoder.feed_forward}.{decoder.down}",
    )
    return Sharing(
        linears={f"layers.*.{name}": Split.COLUMN for name in columns}
        | {f"layers.*.{name}": Split.ROW for name in rows},
        sizes=("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    )


def head_dim(config: Any) -> int:
    """Return the head dimension."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _number(config: Any, name: str) -> float | None:
    found = getattr(config, name, None) if name else None
    return None if found is None else float(found)


def _kinds(config: Any) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ()


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

MIXTURES: Mapping[str, Decoder] = {
    "dots1": Decoder(experts=True, windows=Windows.NAMED, query_norm="q_norm", key_norm="k_norm"),
    "mixtral": Decoder(experts=True, windows=Windows.ALL),
    "qwen2_moe": Decoder(experts=True, windows=Windows.NAMED),
    "qwen3_moe": Decoder(experts=True, windows=Windows.ALL, query_norm="q_norm", key_norm="k_norm"),
}
"""Models of the generic path whose layers follow the pattern but for their experts. Transformers loads them."""


class TextFamily:
    """A text model with a `Decoder` description; attributes and methods as in `Family`."""

    flips: tuple[str, ...] = ()
    language_prefixes: tuple[str, ...] = ("model.", "")
    own_modules = False

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

        config = self.model_config(path)
        model: nn.Module = build_model(AutoModel, config, self.name, attn_implementation=attention)
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


def text_family(name: str, config: Any, *, mixtures: bool = False) -> TextFamily | None:
    """Return the family for a configuration object, also one of `MIXTURES` if asked; None for the generic path."""
    decoder = DECODERS.get(name) or (MIXTURES.get(name) if mixtures else None)
    return None if decoder is None or decoder.unfit(config) else TextFamily(name, decoder)
