"""Where a request of a generate group is, in words for operators."""

from __future__ import annotations

from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.generate.blocks import BlockPool
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import Phase, RequestState


def explained(
    state: RequestState,
    limits: SchedulerLimits,
    cache: EmbeddingCache,
    pool: BlockPool,
    *,
    group: str,
    done: int,
) -> str:
    """Return where a request is, and what it waits for.

    `group` says how its group is, and `done` is the last step there that has completed.
    """
    match state.phase:
        case Phase.ITEMS:
            wanted = sorted(state.wanted)
            missing = [one for one in wanted if not cache.is_ready(state.items[one].key)]
            return f"{state.phase}: items {missing} of {len(state.items)} are not encoded yet"
        case Phase.READY:
            need = limits.blocks_for(len(state.tokens))
            return f"{state.phase}: needs {need} KV blocks, {pool.available} available"
        case Phase.PREFILL:
            return f"{state.phase}: {state.computed} of {len(state.tokens)} tokens in slot {state.slot}"
        case Phase.DECODE:
            outputs = max(0, done - state.decoding_since + 1)
            return f"{state.phase}: {outputs} tokens since it joined slot {state.slot}"
        case Phase.SUSPENDED:
            return f"{state.phase}: {group}"
        case _:
            return str(state.phase)
