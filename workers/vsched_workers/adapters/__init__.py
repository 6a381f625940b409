"""LoRA adapters as PEFT writes them, applied to rows of different adapters in one pass. No server takes them yet."""

from vsched_workers.adapters.files import Adapter, LowRankPair, read_adapter
from vsched_workers.adapters.layers import AdaptedModule

__all__ = ["AdaptedModule", "Adapter", "LowRankPair", "read_adapter"]
