"""Of what the layers of a language model are made: told once, for backends that compute layers by themselves.

Most decoders are of one make: RMS norms, rotary embedding, grouped queries, a gated feed-forward. They differ in the
names of their weights and in a few traits. `Decoder` holds both; what a backend computes follows from it and from the
configuration, never from the name of a family. The table of families that are of this make is in `decoders.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vsched_workers.families.sharing import Sharing, Split

SLIDING = "sliding_attention"


class Windows(enum.Enum):
    """Which layers see `sliding_window` tokens only: none, all, or those that `layer_types` names."""

    NONE = enum.auto()
    ALL = enum.auto()
    NAMED = enum.auto()


class Activation(enum.Enum):
    """What the gate of a feed-forward passes through."""

    SILU = enum.auto()
    GELU = enum.auto()
    GELU_TANH = enum.auto()


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
"""What configurations call them."""


class NormWeights(enum.Enum):
    """How a norm multiplies by its weights: the rounded row, or before it is rounded, or so by one plus the weight."""

    AFTER_ROUNDING = enum.auto()
    BEFORE_ROUNDING = enum.auto()
    PLUS_ONE = enum.auto()


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The norms of a layer, by name; empty where there is none.

    Attributes:
        before_attention: Of what attention takes; `before_feed_forward` of what the feed-forward takes.
        after_attention: Of what attention adds to the rows; `after_feed_forward` of what the feed-forward adds.
        weights: How they multiply by their weights; the norms of heads do alike.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = ""
    weights: NormWeights = NormWeights.AFTER_ROUNDING


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Entries of a configuration that say more of what is computed, by name; empty where nothing is asked for.

    Attributes:
        activation: What the gate of a feed-forward passes through.
        rotates: Of each layer, whether it rotates.
        rows_factor: What embeddings are multiplied with.
        added_factor: What attention and feed-forward add is multiplied with.
        score_bound: Scores are bent towards plus and minus this.
        logit_divisor: What logits are divided by.
        logit_bound: Logits are bent towards plus and minus this.
    """

    activation: str = "hidden_act"
    rotates: str = ""
    rows_factor: str = ""
    added_factor: str = ""
    score_bound: str = ""
    logit_divisor: str = ""
    logit_bound: str = ""


class LogitRule(NamedTuple):
    """What becomes of logits: they are divided, and then bent towards plus and minus a bound; None for neither."""

    divisor: float | None
    bound: float | None


class AttentionKind(NamedTuple):
    """What the layers of a model may differ in.

    Attributes:
        window: Tokens that a row sees, itself included; None for all before it.
        rotates: Whether queries and keys are rotated.
        frequencies: Which of the frequencies of rotation, by the kind of layer; empty where there are but one.
    """

    window: int | None
    rotates: bool
    frequencies: str = ""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The make of a language model: names of modules within a layer, and traits.

    Attributes:
        axes: Whether positions are those of images, on three axes, beside that in the text.
        experts: Whether layers have mixtures of experts.
        attention: The module of attention, below which are the names of its parts.
        qkv: Its linear layers for queries, keys and values; one name where they are one layer already.
        output: Its linear layer after attention.
        query_norm: Its norm of the heads of queries; empty where there is none.
        key_norm: The same for keys.
        norms_all_heads: Whether these norms are of all heads of a row at once.
        feed_forward: The module of the feed-forward, below which are the names of its parts.
        gate_up: Its linear layers for the gate and what is gated; one name where they are one layer already.
        down: Its linear layer back to the hidden size.
        windows: Which layers have windows.
        rotates_by_window: Whether, of layers some of which have windows, only those rotate.
        frequencies_by_kind: Whether each kind of layer has frequencies of rotation of its own.
        norms: The norms of a layer.
        entries: Entries of the configuration that say more.
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
        """Return what a configuration asks for beyond this make, in the plural; empty where it is of this make."""
        if self.experts:
            return "mixtures of experts"
        if getattr(config, "is_heterogeneous", False):
            return "layers of several sizes"
        if self.windows is not Windows.NAMED and SLIDING in _kinds(config):
            return "windows that only some layers have"
        if getattr(config, self.entries.activation, None) not in ACTIVATIONS:
            return "other activations"
        if getattr(config, "use_bidirectional_attention", None):
            return "positions that see later ones"
        rope = getattr(config, "rope_parameters", None) or {}
        several = [each for each in rope.values() if isinstance(each, Mapping)]
        if several and not self.frequencies_by_kind:
            return "several rotary embeddings"
        if any(each.get("partial_rotary_factor", 1.0) != 1.0 for each in (rope, *several)):
            return "heads that are rotated in part"
        if head_dim(config) % 2:
            return "heads of an odd size"
        return ""

    def activation(self, config: Any) -> Activation:
        """Return the activation of the gate."""
        return ACTIVATIONS[getattr(config, self.entries.activation)]

    @property
    def adds_plainly(self) -> bool:
        """Whether what attention and feed-forward make is added as it is, and normed as most models do."""
        norms = self.norms
        return (
            bool(norms.before_attention and norms.before_feed_forward)
            and not (norms.after_attention or norms.after_feed_forward)
            and norms.weights is NormWeights.AFTER_ROUNDING
            and not self.entries.added_factor
        )

    def score_bound(self, config: Any) -> float | None:
        """Return what scores are bent towards; None for straight ones."""
        return _number(config, self.entries.score_bound)

    def rows_factor(self, config: Any) -> float:
        """Return what embeddings are multiplied with."""
        return _number(config, self.entries.rows_factor) or 1.0

    def added_factor(self, config: Any) -> float:
        """Return what attention and feed-forward add is multiplied with."""
        return _number(config, self.entries.added_factor) or 1.0

    def logit_rule(self, config: Any) -> LogitRule | None:
        """Return what becomes of logits; None where they stay as they are."""
        divisor = _number(config, self.entries.logit_divisor)
        bound = _number(config, self.entries.logit_bound)
        return None if divisor is None and bound is None else LogitRule(divisor, bound)

    def kinds(self, config: Any) -> list[AttentionKind]:
        """Return what attention of each layer is like."""
        count = config.num_hidden_layers
        window = None if self.windows is Windows.NONE else getattr(config, "sliding_window", None)
        if window is not None and window >= config.max_position_embeddings:
            window = None
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
        """How ranks share it; None where they cannot, as linear layers that are one already cannot be cut apart."""
        if self.experts or self.norms_all_heads or len(self.qkv) != 3 or len(self.gate_up) != 2:
            return None
        columns = [f"{self.attention}.{name}" for name in self.qkv]
        columns += [f"{self.feed_forward}.{name}" for name in self.gate_up]
        rows = (f"{self.attention}.{self.output}", f"{self.feed_forward}.{self.down}")
        return Sharing(
            linears={f"layers.*.{name}": Split.COLUMN for name in columns}
            | {f"layers.*.{name}": Split.ROW for name in rows},
            sizes=("num_attention_heads", "num_key_value_heads", "intermediate_size"),
        )


def head_dim(config: Any) -> int:
    """Return the values of one attention head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _number(config: Any, name: str) -> float | None:
    found = getattr(config, name, None) if name else None
    return None if found is None else float(found)


def _kinds(config: Any) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ()
