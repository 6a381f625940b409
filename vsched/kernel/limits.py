"""The kernel's limits and the policies it consults."""

from __future__ import annotations

import msgspec

from vsched.policy import (
    AdmissionPolicy,
    DispatchPolicy,
    DraftingPolicy,
    EncodingPolicy,
    EvictionPolicy,
    FrontDoorPolicy,
    InsertionPolicy,
    PreemptionPolicy,
    ReclaimPolicy,
    RoutingPolicy,
    StepPolicy,
)


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Every limit of a scheduler.

    Attributes:
        block_size: Tokens of a KV block.
        blocks: KV blocks of each generate group.
        slots: Most sequences that run at once in a generate group.
        batch_tokens: Most tokens of one generate step; at least `slots` + 1, so that prefill always progresses.
        chunk_tokens: Longest piece of one prompt in a step.
        step_target_ns: How long a step with prefill may take while others decode; 0 for no limit.
        step_target_ratio: How many times the time of decoding alone it may always take.
        context_tokens: Longest prompt plus output.
        page_rows: Embedding rows of an arena page.
        pages: Arena pages for embeddings.
        encode_items: Most items of one step of one encode group.
        waiting: Most requests that wait for a slot.
        waiting_bytes: Most host bytes (tokens, pixels) that waiting requests hold together; one alone may hold more.
        state_snapshots: Places for states at ends of KV blocks, without which cached blocks are of no use; None for a
            model that keeps no state.
        generate_depth: Decisions that may be out before their results are back; 2 is one step ahead.
        waiting_ns: How long a request may wait for its first step; 0 for no limit.
        encoders: Encode groups; 0 where no request has images.
        generators: Generate groups.
        encode_pauses: Each encode group runs in the processes of a generate group, and pauses for its steps.
        item_atomic: One chunk holds each run of an item whole, however long it is: its positions see each other.
        prompt_atomic: One chunk holds a prompt whole.
        drafts: Ranks can verify drafted tokens.
        draft_model: They have a model that drafts.
        swap_blocks: Places of a KV block each in the host memory of each generate group, for preempted requests.
    """

    block_size: int = 16
    blocks: int
    slots: int = 64
    batch_tokens: int = 2048
    chunk_tokens: int = 512
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
        """Whether KV blocks of one sequence can be of use to another.

        They say nothing of the state that a sequence had at their end, and what a prompt's later tokens made of them is
        only right with these.
        """
        return self.state_snapshots != 0 and not self.prompt_atomic

    @property
    def atom_tokens(self) -> int:
        """The most tokens that one chunk can have to hold whole: what every step has beside a decode of each slot."""
        return self.batch_tokens - self.slots

    def blocks_for(self, tokens: int) -> int:
        """Return the KV blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def pages_for(self, tokens: int) -> int:
        """Return the arena pages that hold `tokens` embedding rows."""
        return -(-tokens // self.page_rows)


class KernelPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """The policies that a scheduler consults."""

    encode_admission: AdmissionPolicy
    generate_admission: AdmissionPolicy
    encoding: EncodingPolicy
    dispatch: DispatchPolicy
    embedding_eviction: EvictionPolicy
    reclaim: ReclaimPolicy
    prefix_eviction: EvictionPolicy
    insertion: InsertionPolicy
    preemption: PreemptionPolicy
    drafting: DraftingPolicy
    step: StepPolicy
    routing: RoutingPolicy
    front_door: FrontDoorPolicy
