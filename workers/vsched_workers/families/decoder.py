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


ACTIVATIONS: Mapping[str, Activation] = {"silu": Activation.SILU, "swish": Activation.SILU}
"""What configurations call them."""


class AttentionKind(NamedTuple):
    """What the layers of a model may differ in.

    Attributes:
        window: Tokens that a row sees, itself included; None for all before it.
        rotates: Whether queries and keys are rotated.
    """

    window: int | None
    rotates: bool


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
        feed_forward: The module of the feed-forward, below which are the names of its parts.
        gate_up: Its linear layers for the gate and what is gated; one name where they are one layer already.
        down: Its linear layer back to the hidden size.
        windows: Which layers have windows.
        rotates: The entry of the configuration that tells of each layer whether it rotates; empty where all do.
    """

    axes: bool = False
    experts: bool = False
    attention: str = "self_attn"
    qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    query_norm: str = ""
    key_norm: str = ""
    feed_forward: str = "mlp"
    gate_up: Sequence[str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    windows: Windows = Windows.NONE
    rotates: str = ""

    def unfit(self, config: Any) -> str:
        """Return what a configuration asks for beyond this make, in the plural; empty where it is of this make."""
        if self.experts:
            return "mixtures of experts"
        if getattr(config, "is_heterogeneous", False):
            return "layers of several sizes"
        if self.windows is not Windows.NAMED and SLIDING in _kinds(config):
            return "windows that only some layers have"
        if getattr(config, "hidden_act", None) not in ACTIVATIONS:
            return "other activations"
        rope = getattr(config, "rope_parameters", None) or {}
        if any(isinstance(each, Mapping) for each in rope.values()):
            return "several rotary embeddings"
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            return "heads that are rotated in part"
        if head_dim(config) % 2:
            return "heads of an odd size"
        return ""

    def activation(self, config: Any) -> Activation:
        """Return the activation of the gate."""
        return ACTIVATIONS[config.hidden_act]

    def kinds(self, config: Any) -> list[AttentionKind]:
        """Return what attention of each layer is like."""
        count = config.num_hidden_layers
        window = None if self.windows is Windows.NONE else getattr(config, "sliding_window", None)
        if window is not None and window >= config.max_position_embeddings:
            window = None
        windows = [window] * count
        if self.windows is Windows.NAMED:
            windows = [window if kind == SLIDING else None for kind in _kinds(config)] or windows
        rotates = getattr(config, self.rotates) if self.rotates else [True] * count
        return [
            AttentionKind(one, bool(other)) for one, other in zip(windows, rotates, strict=True)
        ]

    @property
    def sharing(self) -> Sharing | None:
        """How ranks share it; None where they cannot, as linear layers that are one already cannot be cut apart."""
        if self.experts or len(self.qkv) != 3 or len(self.gate_up) != 2:
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


def _kinds(config: Any) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ()
