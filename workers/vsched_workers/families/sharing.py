"""How ranks share a module: a table of its parts."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class Split(enum.Enum):
    """How the ranks share a linear layer: by its outputs, by its inputs, or its three parts by outputs each."""

    COLUMN = enum.auto()
    ROW = enum.auto()
    FUSED = enum.auto()


@dataclass(frozen=True)
class Sharing:
    """How several ranks share a module; what is not named every rank has in full.

    Attributes:
        linears: The linear layers to split, by patterns of their names.
        experts: The mixtures of experts, by a pattern of their names; a rank has whole experts of each.
        absent: Patterns of linear layers that a checkpoint may be without.
        counts: Attributes of modules that count heads, by patterns of the modules' names; a rank counts its own.
        sizes: Entries of the module's part of `config.json` that the number of ranks must divide.
    """

    linears: Mapping[str, Split]
    sizes: Sequence[str]
    counts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    experts: str = ""
    absent: Sequence[str] = ()
