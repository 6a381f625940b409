"""Where a request is and why, in words for operators."""

from __future__ import annotations

from vsched.kernel.encode.stage import EncodeStage
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import Phase, RequestState


def explain(
    state: RequestState, limits: SchedulerLimits, encode: EncodeStage, home: GenerateGroup
) -> str:
    """Return what a request does or waits for, in its group `home`."""
    match state.phase:
        case Phase.ITEMS:
            missing = [
                index
                for index in sorted(state.wanted)
                if not encode.is_ready(state.items[index].key)
            ]
            return f"{state.phase}: items {missing} of {len(state.items)} are not encoded yet"
        case Phase.READY:
            need = limits.blocks_for(len(state.tokens))
            return f"{state.phase}: needs {need} KV blocks, {home.pool.available} available"
        case Phase.PREFILL:
            return f"{state.phase}: {state.computed} of {len(state.tokens)} tokens in slot {state.slot}"
        case Phase.DECODE:
            outputs = max(0, home.flight.done - state.first_step + 1)
            return f"{state.phase}: {outputs} tokens since it joined slot {state.slot}"
        case Phase.PARKED:
            return f"{state.phase}: {home.name} is {home.status}"
        case Phase.SETTLING:
            return str(state.phase)
