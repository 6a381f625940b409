"""Views of live requests and memory maps, for operators; built when asked, so that steps do not pay for them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vsched.kernel.request import Phase, RequestState

MAP_CELLS_MAX = 400
"""Maximum number of cells of a memory map; a cell of a larger memory stands for several blocks or pages."""
CELL_SAMPLES_MAX = 16
"""Maximum number of KV blocks that are looked at for a cell, so that a map of a large cache costs no more."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has not ended; times are of the kernel's clock, 0 for not yet.

    Attributes:
        group: Its generate group; empty before it has one.
        phase: Name of its `Phase` in lower case, or `held` or `preparing` before it is submitted.
        why: Phase and reason, as a sentence.
        since_ns: Beginning of its phase; 0 if unknown.
        computed: Prompt tokens whose KV is computed or planned.
        cached_tokens: Prompt tokens found in the prefix cache.
        outputs: Output tokens so far.
        slot: Its slot; -1 without one.
    """

    request_id: str
    phase: str
    why: str
    since_ns: int = 0
    group: str = ""
    tenant: str = ""
    priority: int = 0
    submitted_ns: int = 0
    items_ready_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    target_ns: int | None = None
    prompt_tokens: int = 0
    computed: int = 0
    cached_tokens: int = 0
    outputs: int = 0
    max_tokens: int = 0
    images: int = 0
    slot: int = -1
    blocks: int = 0
    preemptions: int = 0


class MemoryMap(msgspec.Struct, frozen=True):
    """States of blocks or pages, in order.

    Attributes:
        count: Number of blocks or pages.
        per_cell: Number of them that a cell stands for.
        states: Names of the states, except `free`, which is the rest.
        totals: Number of blocks or pages in each state.
        cells: For each cell, the percentage of its blocks or pages in each state.
    """

    count: int
    per_cell: int
    states: tuple[str, ...]
    totals: tuple[int, ...]
    cells: Sequence[tuple[int, ...]]


def cell_size(count: int) -> int:
    """Return the number of blocks or pages that a cell of a map stands for."""
    return max(1, -(-count // MAP_CELLS_MAX))


def live_request(state: RequestState, group: str, why: str, outputs: int) -> RequestRow:
    """Return the view of a submitted request."""
    request = state.request
    return RequestRow(
        request_id=request.request_id,
        phase=state.phase.name.lower(),
        why=why,
        since_ns=since_ns(state),
        group=group,
        tenant=request.tenant,
        priority=request.priority,
        submitted_ns=state.submitted_ns,
        items_ready_ns=state.items_ready_ns,
        admitted_ns=state.admitted_ns,
        first_token_ns=state.first_token_ns,
        target_ns=state.target_ns,
        prompt_tokens=state.prompt_length,
        computed=min(state.computed, state.prompt_length),
        cached_tokens=state.cached_tokens,
        outputs=outputs,
        max_tokens=request.sampling.max_tokens,
        images=len(state.items),
        slot=state.slot,
        blocks=len(state.blocks),
        preemptions=state.preemptions,
    )


def since_ns(state: RequestState) -> int:
    """Return the time at which a request entered its phase, as far as known."""
    match state.phase:
        case Phase.PREFILL:
            return state.admitted_ns
        case Phase.DECODE:
            return state.first_token_ns
        case Phase.READY if not state.preemptions:
            return state.items_ready_ns or state.submitted_ns
        case _:
            return state.yielded_ns or state.advanced_ns or state.submitted_ns
