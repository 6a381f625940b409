"""A request inside the kernel, and the log of tokens that running requests share."""

from __future__ import annotations

import enum
from array import array
from collections import deque

from vsched.types import MediaItem, Request


class Phase(enum.StrEnum):
    """Where a request is; `Scheduler.explain` says why."""

    ITEMS = "waiting for embeddings"
    READY = "waiting for a slot"
    SETTLING = "preempted, its last step is still out"
    PREFILL = "prefilling"
    DECODE = "decoding"


class RequestState:
    """All that the kernel knows of one accepted request.

    Attributes:
        order: Its place in line for life: arrival number first.
        tokens: Prompt, then the outputs of earlier lives (before a preemption or a restart).
        hashes: Block hashes of the full blocks of `tokens`.
        computed: Tokens whose KV is decided (sent or done); meaningful while it has a slot.
        first_step: The step that yields the first token of this life; -1 before its last chunk is decided.
        bucket: Which steps, modulo the block size, give it a block while it decodes.
        wanted: Indices of its items that it asked the encode stage for and has not consumed.
        known: Whether the generate ranks hold its data.
        losses: How often a group went down while it was in flight there.
    """

    __slots__ = (
        "admitted_ns",
        "blocks",
        "bucket",
        "cached_tokens",
        "computed",
        "encoded_items",
        "first_step",
        "first_token_ns",
        "hashes",
        "items_ready_ns",
        "known",
        "losses",
        "number",
        "order",
        "phase",
        "preemptions",
        "request",
        "slot",
        "stop_token_ids",
        "submitted_ns",
        "tokens",
        "uncached",
        "wanted",
    )

    def __init__(
        self, request: Request, number: int, stop_token_ids: tuple[int, ...], now_ns: int
    ) -> None:
        self.request = request
        self.number = number
        self.order = (number, 0)
        self.stop_token_ids = stop_token_ids
        self.phase = Phase.ITEMS
        self.tokens = array("i", request.prompt_token_ids)
        self.hashes: list[bytes] = []
        self.blocks: list[int] = []
        self.slot = -1
        self.bucket = 0
        self.computed = 0
        self.uncached = len(self.tokens)
        self.first_step = -1
        self.wanted: set[int] = set()
        self.known = False
        self.losses = 0
        self.preemptions = 0
        self.cached_tokens = 0
        self.encoded_items = 0
        self.submitted_ns = now_ns
        self.items_ready_ns = 0
        self.admitted_ns = 0
        self.first_token_ns = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt as submitted."""
        return len(self.request.prompt_token_ids)

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """Its items in prompt order."""
        return self.request.items


class ReadyEntry:
    """A request as an admission policy sees it."""

    __slots__ = ("_block_size", "order", "state")

    def __init__(self, state: RequestState, block_size: int) -> None:
        self.state = state
        self.order = state.order
        self._block_size = block_size

    @property
    def tokens(self) -> int:
        """Tokens still to be computed, as far as known."""
        return self.state.uncached

    @property
    def blocks(self) -> int:
        """KV blocks of all its known tokens."""
        return -(-len(self.state.tokens) // self._block_size)

    @property
    def priority(self) -> int:
        """The request's priority."""
        return self.state.request.priority

    @property
    def arrived_ns(self) -> int:
        """When it was submitted."""
        return self.state.submitted_ns

    def __repr__(self) -> str:
        return f"<request {self.state.number}: {self.tokens} tokens, {self.blocks} blocks>"


class TokenLog:
    """The token batches of past steps, kept as they came.

    A step appends its batch without looking into it, so the kernel's cost does not grow with the running requests.
    Only when a request leaves its slot are its tokens gathered, slot by slot, from the steps that it took part in.
    """

    def __init__(self) -> None:
        self._batches: deque[array[int]] = deque()
        self._first_step = 0

    def append(self, step: int, tokens: array[int]) -> None:
        """Keep the batch of a step; steps come without gaps."""
        if not self._batches:
            self._first_step = step
        assert step == self._first_step + len(self._batches), "a step's tokens are missing"
        self._batches.append(tokens)

    def gather(self, slot: int, first_step: int, last_step: int) -> array[int]:
        """Return the tokens of a slot over the steps [first_step, last_step]."""
        start = first_step - self._first_step
        stop = last_step - self._first_step + 1
        if start == 0 and stop == len(self._batches):
            return array("i", [batch[slot] for batch in self._batches])
        batches = self._batches
        return array("i", [batches[index][slot] for index in range(start, stop)])

    def forget_before(self, step: int) -> None:
        """Drop the batches that no running request needs any more."""
        while self._batches and self._first_step < step:
            self._batches.popleft()
            self._first_step += 1

    def clear(self) -> None:
        """Drop everything (the group starts anew)."""
        self._batches.clear()
