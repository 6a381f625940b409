"""A KV cache of the size that the operator says, refused at start-up where it cannot fit."""

from __future__ import annotations

from vsched.errors import limit_message
from vsched.policy import Build, Fail, MemoryPolicy, MemoryView, PositiveCount


class Pinned(MemoryPolicy, frozen=True, kw_only=True):
    """Builds a KV cache of a given size, in tokens or in bytes; measures nothing.

    Attributes:
        tokens: The size in tokens; give this or `bytes`.
        bytes: The size in bytes, rounded down to whole tokens.
    """

    tokens: PositiveCount | None = None
    bytes: PositiveCount | None = None

    def __post_init__(self) -> None:
        """Refuse a size that is given twice, or not at all."""
        if (self.tokens is None) == (self.bytes is None):
            given = "neither" if self.tokens is None else "both"
            message = limit_message(
                "the size of the KV cache must be given once",
                value=f"{given} of tokens and bytes",
                limit="exactly one",
                remedy='set tokens or bytes, as in {use = "pinned", tokens = 16384}',
            )
            raise ValueError(message)

    def plan(self, view: MemoryView) -> Build | Fail:
        """Return the size, unless it is too small for one request or too large for the device."""
        tokens = self.tokens if self.bytes is None else self.bytes // view.bytes_per_token
        assert tokens is not None, "__post_init__ has seen to it"
        if tokens < view.tokens_min:
            return Fail(
                limit_message(
                    "generate.memory: the KV cache holds too few tokens for one request",
                    value=f"{tokens} tokens",
                    limit=f"at least {view.tokens_min} tokens",
                    remedy=f"raise generate.memory.tokens to {view.tokens_min} or more "
                    f"({view.tokens_min * view.bytes_per_token} bytes), or lower generate.context_tokens",
                )
            )
        # What other processes hold is neither ours nor available, and mem_fraction applies to what is left (C4, C5).
        peers_bytes = max(view.total_bytes - view.available_bytes - view.weights_bytes, 0)
        room_bytes = int(self.mem_fraction * (view.total_bytes - view.weights_bytes - peers_bytes))
        kv_bytes = tokens * view.bytes_per_token
        if kv_bytes > room_bytes:
            tokens_max = max(room_bytes // view.bytes_per_token, 0)
            return Fail(
                limit_message(
                    f"generate.memory: the KV cache does not fit on {view.device}",
                    value=f"{tokens} tokens x {view.bytes_per_token} bytes = {kv_bytes} bytes",
                    limit=f"{room_bytes} bytes ({tokens_max} tokens), which is mem_fraction {self.mem_fraction} of "
                    f"{view.total_bytes} bytes less {view.weights_bytes} of weights and {peers_bytes} of others",
                    remedy=f"lower generate.memory.tokens to {tokens_max} or less, "
                    "raise generate.memory.mem_fraction (1.0 at most), or free the device",
                )
            )
        return Build(tokens)
