"""A restarted group builds what was accepted before."""

from __future__ import annotations

from vsched.errors import limit_message
from vsched.policy import AcceptBuild, Build, Fail, MemoryPolicy, MemoryView, Probe


class Rebuild(MemoryPolicy, frozen=True, kw_only=True):
    """Builds a KV cache of a known size, which was proved when it was accepted; nothing is measured again."""

    tokens: int

    def plan(self, view: MemoryView) -> Probe | Build | AcceptBuild | Fail:
        """Return the one size, or the reason why it is there no more."""
        if not view.attempts:
            return Build(self.tokens, profile=False)
        if view.attempts[-1].outcome == "fits":
            return AcceptBuild()
        return Fail(
            limit_message(
                "the generate group cannot build the KV cache that it had before it was lost "
                f"({view.attempts[-1].message or 'no rank gave details'})",
                value=f"{self.tokens} tokens",
                limit="what is free on the device now",
                remedy="see what else takes the device's memory, or restart the server",
            )
        )
