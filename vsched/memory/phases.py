"""The phases in which memory was sized: each reservation, probe and build, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from vsched.memory.pools import size_text, table_text
from vsched.policy import AttemptOutcome, MemoryView, RankMemory


class SizingPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation of an encode rank, or one attempt of a generate group.

    Attributes:
        owner: The encode rank or the generate group.
        tokens: Of the KV cache; 0 for a reservation.
        retry: How many attempts of the same kind had failed before; 0 for the first.
        headroom_bytes: Held meanwhile.
        profile: Whether the largest batch or steps ran; otherwise the size was only taken.
        message: What the ranks said on which it did not fit.
        ranks: What each rank measured; empty where an encode rank has not.
    """

    owner: str
    action: Literal["reserve", "probe", "build"]
    outcome: AttemptOutcome
    tokens: int = 0
    retry: int = 0
    headroom_bytes: int = 0
    profile: bool = True
    message: str = ""
    ranks: tuple[RankMemory, ...] = ()

    @property
    def tightest(self) -> RankMemory | None:
        """The rank whose peak came nearest to its total."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes - rank.total_bytes, default=None)


def sizing_phases(
    view: MemoryView, encoders: Sequence[RankMemory], encoder_names: Sequence[str], group: str
) -> list[SizingPhase]:
    """Return the phases of a generate group, oldest first, after the reservations that it waited for."""
    return [*_reservations(view, encoders, encoder_names), *_attempts(view, group)]


def _reservations(
    view: MemoryView, encoders: Sequence[RankMemory], names: Sequence[str]
) -> Iterator[SizingPhase]:
    for index, one in enumerate(view.reservations):
        ranks = tuple(
            msgspec.structs.replace(rank, peak_bytes=rank.reserved_bytes + one.growth_bytes)
            for rank in encoders[index : index + 1]
        )
        yield SizingPhase(
            owner=names[index] if names else f"encode rank {one.rank}",
            action="reserve",
            outcome="fits",
            profile=one.measured,
            ranks=ranks,
        )


def _attempts(view: MemoryView, group: str) -> Iterator[SizingPhase]:
    for index, attempt in enumerate(view.attempts):
        before = [one for one in view.attempts[:index] if one.action == attempt.action]
        yield SizingPhase(
            owner=group,
            action=attempt.action,
            outcome=attempt.outcome,
            tokens=attempt.tokens,
            retry=sum(one.outcome != "fits" for one in before),
            headroom_bytes=attempt.headroom_bytes,
            profile=attempt.profile,
            message=attempt.message,
            ranks=tuple(attempt.ranks),
        )


def render_phases(phases: Sequence[SizingPhase]) -> str:
    """Draw the phases as a table, and under it what ranks said on which one did not fit; empty without phases."""
    if not phases:
        return ""
    rows = [("phase", "outcome", "KV tokens", "headroom", "peak", "limit")]
    said = []
    for phase in phases:
        name = f"{phase.owner}: {phase.action}{f', retry {phase.retry}' if phase.retry else ''}"
        rank = phase.tightest
        rows.append(
            (
                name,
                phase.outcome.replace("_", " ") + ("" if phase.profile else ", not measured"),
                f"{phase.tokens:,}" if phase.tokens else "",
                size_text(phase.headroom_bytes) if phase.headroom_bytes else "",
                size_text(rank.peak_bytes) if rank else "",
                size_text(rank.total_bytes) if rank else "",
            )
        )
        if phase.message:
            said.append(f"{name}: {phase.message}")
    return "\n".join([table_text(rows, "<<>>>>"), *said])
