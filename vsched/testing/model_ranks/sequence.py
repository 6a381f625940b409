"""A sequence as a model rank keeps it, over a symbolic memory."""

from __future__ import annotations

from vsched.types import MediaItem


def output_token(seed: int, position: int) -> int:
    """Return the token that model ranks "sample": a function of prompt and position, the same in every process."""
    return 100 + hash((seed, position)) % 5000


def prompt_seed(prompt: list[int]) -> int:
    """Return what the outputs of a prompt depend on."""
    return hash(tuple(prompt))


class ModelSequence:
    """Token ids, and for each the fingerprint of all that its KV depends on."""

    def __init__(
        self,
        tokens: list[int],
        prompt_length: int,
        max_tokens: int,
        items: tuple[MediaItem, ...],
        cache_salt: str,
    ) -> None:
        self.tokens = tokens
        self.prompt_length = prompt_length
        self.max_tokens = max_tokens
        self.items = items
        self.seed = prompt_seed(tokens[:prompt_length])
        self.blocks: list[int] = []
        self.computed = 0
        self.decoding = False
        self._fingerprints: list[int] = []
        self._root = hash(cache_salt)

    def leave(self) -> None:
        """Lose the slot and all that lies in blocks."""
        self.decoding, self.blocks, self.computed = False, [], 0

    def fingerprints(self) -> list[int]:
        """Return, for each known position, what its KV depends on: all tokens and items up to it."""
        known = self._fingerprints
        if len(known) < len(self.tokens):
            seen = known[-1] if known else self._root
            for position in range(len(known), len(self.tokens)):
                within = next(
                    (item for item in self.items if item.offset <= position < item.end), None
                )
                content = None if within is None else (within.key, position - within.offset)
                seen = hash((seen, self.tokens[position], content))
                known.append(seen)
        return known
