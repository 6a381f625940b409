"""The limits of a scheduler."""

from __future__ import annotations

import msgspec


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a scheduler.

    Attributes:
        block_size: Tokens of a KV block.
        blocks: KV blocks of each generate group.
        slots: Maximum number of sequences that run at once in a generate group.
        batch_tokens: Maximum number of tokens of a generate step; at least `slots` + 1, so that prefill progresses.
        chunk_tokens: Maximum length of a prefill chunk.
        prefill_target_ns: Time limit of a step of prefill alone; 0 for none.
        step_target_ns: Time limit of a step with prefill and decodes; 0 for none.
        step_target_ratio: Such a step may always take this multiple of the time of its decodes, and prefill alone that
            of one decode.
        context_tokens: Maximum length of prompt plus output.
        page_rows: Embedding rows of an arena page.
        pages: Arena pages for embeddings.
        encode_items: Maximum number of items in a step of an encode group.
        waiting: Maximum number of requests that wait for a slot.
        waiting_bytes: Maximum host memory (tokens, pixels) of all waiting requests; a single one may exceed it.
        state_snapshots: Places for recurrent states at ends of KV blocks, without which cached blocks are useless; None
            for a model without such a state.
        generate_depth: Maximum number of decisions in flight; 2 is one step ahead.
        waiting_ns: Time limit for the wait for the first step; 0 for none.
        passed_over_ns: How long policies may hold a request in one place, or pass it over; then it goes first.
        encoders: Number of encode groups; 0 if no request has images.
        generators: Number of generate groups.
        encode_pauses: Each encode group runs in the processes of a generate group, and pauses for its steps.
        item_atomic: No chunk cuts a run of an item, whose positions attend to each other.
        prompt_atomic: No chunk cuts a prompt.
        drafts: Ranks can verify draft tokens.
        draft_model: Ranks have a draft model.
        swap_blocks: Places for KV blocks of preempted requests, in host memory of each generate group.
    """

    block_size: int = 16
    blocks: int
    slots: int = 64
    batch_tokens: int = 2048
    chunk_tokens: int = 512
    prefill_target_ns: int = 0
    step_target_ns: int = 0
    step_target_ratio: float = 8.0
    context_tokens: int
    page_rows: int = 64
    pages: int
    encode_items: int = 8
    waiting: int = 1024
    waiting_bytes: int = 1 << 30
    prefix_cache: bool = True
    state_snapshots: int | None = None
    generate_depth: int = 2
    waiting_ns: int = 0
    passed_over_ns: int = 60 * 1_000_000_000
    encoders: int = 1
    generators: int = 1
    encode_pauses: bool = False
    item_atomic: bool = False
    prompt_atomic: bool = False
    drafts: bool = False
    draft_model: bool = False
    swap_blocks: int = 0

    def __post_init__(self) -> None:
        if self.batch_tokens <= self.slots:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}, must be above slots ({self.slots}): a step full of decodes "
                "would leave no room for prefill"
            )
        if self.swap_blocks and self.state_snapshots is not None:
            raise ValueError(
                "the state of a sequence cannot be swapped out, and its KV is of no use without it"
            )
        if self.encode_pauses and self.encoders != self.generators:
            raise ValueError(
                f"{self.encoders} encode groups cannot share the processes of {self.generators} generate groups"
            )

    @property
    def shares_blocks(self) -> bool:
        """Whether sequences can share KV blocks.

        Not if a recurrent state is missing at their end, or if earlier positions attend to later ones.
        """
        return self.state_snapshots != 0 and not self.prompt_atomic

    @property
    def atom_tokens(self) -> int:
        """Maximum length of a range that no chunk may cut: the tokens of a step next to a decode of each slot."""
        return self.batch_tokens - self.slots

    @property
    def blocks_min(self) -> int:
        """KV blocks of a generate group that can serve any accepted request, alone."""
        return min(self.blocks, self.blocks_for(self.context_tokens))

    def outputs_max(self, prompt_tokens: int, wanted: int) -> int:
        """Return the output limit of a request: `wanted`, at most the rest of context and KV cache; 0 for all of it."""
        room = max(min(self.context_tokens, self.blocks * self.block_size) - prompt_tokens, 1)
        return min(wanted or room, room)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of KV blocks for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def pages_for(self, tokens: int) -> int:
        """Return the number of arena pages for `tokens` embedding rows."""
        return -(-tokens // self.page_rows)
