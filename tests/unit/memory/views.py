"""Views of a memory policy, with round numbers."""

from __future__ import annotations

from typing import Any

import msgspec

from vsched.errors import DeviceOutOfMemory
from vsched.policy import Attempt, Build, MemoryPolicy, MemoryView, Probe, RankMemory, Reservation

TOTAL = 1_000_000


def rank_memory(**changes: Any) -> RankMemory:
    """Measured after loading: 200,000 bytes of own memory, 100,000 of peers, 700,000 free."""
    memory = RankMemory(
        rank=0,
        pool="device",
        total_bytes=TOTAL,
        available_bytes=700_000,
        reserved_bytes=200_000,
        weights_bytes=150_000,
    )
    return msgspec.structs.replace(memory, **changes)


def attempted(action: Any, tokens: int, outcome: Any = "fits", **changes: Any) -> Attempt:
    """An attempt on one rank, with a peak of 250,000 bytes plus 10 bytes of KV per token, and 100,000 of peers."""
    kv_bytes = 10 * tokens
    measured: dict[str, Any] = {
        "kv_bytes": kv_bytes,
        "peak_bytes": 250_000 + kv_bytes,
        "reserved_bytes": 220_000 + kv_bytes,
        "available_bytes": TOTAL - 100_000 - 220_000 - kv_bytes,
        **changes,
    }
    message = "" if outcome == "fits" else f"rank 0: {outcome}"
    ranks = [rank_memory(**measured)]
    return Attempt(action=action, tokens=tokens, outcome=outcome, message=message, ranks=ranks)


def memory_view(**changes: Any) -> MemoryView:
    """One rank, no encoders, 10 bytes a token."""
    view = MemoryView(
        ranks=[rank_memory()],
        bytes_per_token=10,
        block_size=16,
        context_tokens=1024,
        batch_tokens=2048,
        slots=64,
    )
    return msgspec.structs.replace(view, **changes)


def requested(
    policy: MemoryPolicy, *attempts: Attempt, **changes: Any
) -> Probe | Build | str | None:
    """Return a policy's order after these attempts; None if it accepts the last, the message if it gives up."""
    plan = policy.plan(memory_view(**changes))
    try:
        order = next(plan)
        for attempt in attempts:
            order = plan.send(attempt)
    except StopIteration:
        return None
    except DeviceOutOfMemory as error:
        return str(error)
    return order


def reserved(growth_bytes: int, **changes: Any) -> Reservation:
    """Not held, on the same device."""
    reservation = Reservation(rank=0, pool="device", growth_bytes=growth_bytes, held=False)
    return msgspec.structs.replace(reservation, **changes)
