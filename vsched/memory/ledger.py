"""The owner of every byte of a memory, and the phases in which it was sized.

One table for start-up, errors, statistics and the profile command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal

import msgspec

from vsched.memory.pools import Pool, group_pools, size_text
from vsched.policy import Attempt, AttemptOutcome, MemoryView, RankMemory

LineName = Literal[
    "weights",
    "adapters",
    "draft model",
    "encoder activations",
    "language activations",
    "embeddings in flight",
    "arena",
    "image preprocessing",
    "kv",
    "state",
    "swap",
    "captured graphs",
    "headroom",
    "peers",
    "unclaimed",
]


class LedgerLine(msgspec.Struct, frozen=True):
    """The bytes of a pool that one owner uses for one thing."""

    pool: str
    owner: str
    line: LineName
    bytes: int


class SizingPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation of an encode rank, or one attempt of a generate group.

    Attributes:
        owner: The encode rank or the generate group.
        tokens: Size of the KV cache; 0 for a reservation.
        retry: Number of earlier attempts of the same kind that failed.
        headroom_bytes: Memory held during the attempt.
        profile: Whether the largest batch or steps ran; otherwise the size was only taken.
        message: Errors of the ranks on which it did not fit.
        ranks: Measurements of each rank; empty if an encode rank did not measure.
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


class Ledger(msgspec.Struct, frozen=True):
    """The total of each pool, the lines that add up to it, and the phases in which they were found.

    Made by `Ledger.balanced`.
    """

    totals: Mapping[str, int]
    lines: Sequence[LedgerLine]
    phases: Sequence[SizingPhase] = ()

    @classmethod
    def balanced(
        cls,
        totals: Mapping[str, int],
        lines: Iterable[LedgerLine],
        phases: Sequence[SizingPhase] = (),
    ) -> Ledger:
        """Add the unclaimed of each pool, which is the rest; it is negative where more is claimed than exists.

        A pool without a measured total counts as just large enough for its lines.
        """
        given = list(lines)
        assert all(line.line != "unclaimed" for line in given), "unclaimed is the rest"
        pools = list(dict.fromkeys([*totals, *(line.pool for line in given)]))
        complete: list[LedgerLine] = []
        complete_totals: dict[str, int] = {}
        for pool in pools:
            own = [line for line in given if line.pool == pool]
            used_bytes = sum(line.bytes for line in own)
            total_bytes = complete_totals[pool] = totals.get(pool, used_bytes)
            complete += [*own, LedgerLine(pool, "", "unclaimed", total_bytes - used_bytes)]
        return cls(complete_totals, complete, phases)

    def of_pool(self, pool: str) -> list[LedgerLine]:
        """Return the lines of one pool."""
        return [line for line in self.lines if line.pool == pool]

    def unclaimed(self, pool: str) -> int:
        """Return the rest of a pool; negative when more is claimed than exists."""
        return sum(line.bytes for line in self.of_pool(pool) if line.line == "unclaimed")

    def render(self) -> str:
        """Draw the table."""
        rows = [("pool and owner", "line", "size", "share")]
        for pool, total_bytes in self.totals.items():
            rows.append((pool, "total", size_text(total_bytes), ""))
            rows += [
                (
                    f"  {line.owner}",
                    line.line,
                    size_text(line.bytes),
                    _share(line.bytes, total_bytes),
                )
                for line in self.of_pool(pool)
            ]
        return _table_text(rows, "<<>>")

    def render_phases(self) -> str:
        """Draw the phases as a table, followed by the errors of failed ones; empty without phases."""
        if not self.phases:
            return ""
        rows = [("phase", "outcome", "KV tokens", "headroom", "peak", "limit")]
        errors = []
        for phase in self.phases:
            name = f"{phase.owner}: {phase.action}{f', retry {phase.retry}' if phase.retry else ''}"
            outcome = phase.outcome.replace("_", " ")
            rank = max(phase.ranks, key=lambda one: one.peak_bytes - one.total_bytes, default=None)
            rows.append(
                (
                    name,
                    outcome if phase.profile else f"{outcome}, not measured",
                    f"{phase.tokens:,}" if phase.tokens else "",
                    size_text(phase.headroom_bytes) if phase.headroom_bytes else "",
                    size_text(rank.peak_bytes) if rank else "",
                    size_text(rank.total_bytes) if rank else "",
                )
            )
            if phase.message:
                errors.append(f"{name}: {phase.message}")
        return "\n".join([_table_text(rows, "<<>>>>"), *errors])

    def summary(self) -> str:
        """Say it in one line, for an error message; without lines of 0 bytes, except reservations."""
        return "; ".join(
            f"{pool}: {size_text(total_bytes)} = "
            + " + ".join(
                f"{line.owner} {line.line} {size_text(line.bytes)}".lstrip()
                for line in self.of_pool(pool)
                if line.bytes or line.line in {"encoder activations", "unclaimed"}
            )
            for pool, total_bytes in self.totals.items()
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON value: every pool with its total and its lines, in bytes, and every phase."""
        return {
            "phases": [msgspec.to_builtins(phase) for phase in self.phases],
            "pools": [
                {
                    "pool": pool,
                    "total": total_bytes,
                    "lines": [
                        {"owner": line.owner, "line": line.line, "bytes": line.bytes}
                        for line in self.of_pool(pool)
                    ],
                }
                for pool, total_bytes in self.totals.items()
            ],
        }


def group_ledger(
    view: MemoryView,
    attempts: Sequence[Attempt] = (),
    *,
    encoders: Sequence[RankMemory] = (),
    together: bool = False,
    more: Sequence[LedgerLine] = (),
    owner: str = "generate",
) -> Ledger:
    """Return the ledger of a generate group at the peak of its last attempt, or after loading before the first.

    Args:
        view: Measurements after loading, and the reservations of encode ranks.
        attempts: All attempts so far, oldest first.
        encoders: Measurements of encode ranks after loading, in the order of the reservations. Without them, their
            weights are among the peers.
        together: Whether the encode ranks are in the processes of the generate ranks, which count their weights too.
        more: Lines of the host or of others, such as the arena; their memory must not be among the peers.
        owner: Name of the generate group, for ranks without a name of their own.
    """
    last = attempts[-1] if attempts else None
    ranks = view.ranks if last is None else last.ranks
    headroom_bytes = 0 if last is None else last.headroom_bytes
    apart = [] if together else list(encoders)
    named = [encoder.owner for encoder in encoders]
    numbers = [one.rank for one in view.reservations or encoders]
    names = [
        name or f"encode rank {number}"
        for name, number in zip_longest(named, numbers, fillvalue="")
    ]
    lines: list[LedgerLine] = []
    for pool in group_pools(ranks, view.reservations):
        held_bytes = sum(
            reservation.growth_bytes
            for reservation in view.reservations
            if reservation.pool == pool.name and reservation.held
        )
        known_bytes = sum(
            rank.weights_bytes + rank.adapter_bytes for rank in apart if rank.pool == pool.name
        )
        lines += _pool_lines(pool, owner, headroom_bytes, held_bytes if together else 0)
        peers_bytes = pool.peers_bytes - known_bytes - (0 if together else held_bytes)
        lines.append(LedgerLine(pool.name, "others", "peers", max(peers_bytes, 0)))
    for name, rank in zip(names, apart, strict=False):
        lines.append(LedgerLine(rank.pool, name, "weights", rank.weights_bytes))
        lines += _adapter_line(rank, name)
    lines += [
        LedgerLine(one.pool, name, "encoder activations", one.growth_bytes)
        for name, one in zip(names, view.reservations, strict=False)
    ]
    totals = {rank.pool: rank.total_bytes for rank in [*apart, *ranks]}
    phases = [*_reserved(view, encoders, names), *_attempted(attempts, owner)]
    return Ledger.balanced(totals, [*lines, *more], phases)


def _reserved(
    view: MemoryView, encoders: Sequence[RankMemory], names: Sequence[str]
) -> Iterator[SizingPhase]:
    for index, (name, one) in enumerate(zip(names, view.reservations, strict=False)):
        ranks = tuple(
            msgspec.structs.replace(rank, peak_bytes=rank.reserved_bytes + one.growth_bytes)
            for rank in encoders[index : index + 1]
        )
        yield SizingPhase(
            owner=name, action="reserve", outcome="fits", profile=one.measured, ranks=ranks
        )


def _attempted(attempts: Sequence[Attempt], group: str) -> Iterator[SizingPhase]:
    failed: Counter[str] = Counter()
    for attempt in attempts:
        yield SizingPhase(
            owner=group,
            action=attempt.action,
            outcome=attempt.outcome,
            tokens=attempt.tokens,
            retry=failed[attempt.action],
            headroom_bytes=attempt.headroom_bytes,
            profile=attempt.profile,
            message=attempt.message,
            ranks=tuple(attempt.ranks),
        )
        failed[attempt.action] += attempt.outcome != "fits"


def _pool_lines(
    pool: Pool, group: str, headroom_bytes: int, held_bytes: int
) -> Iterator[LedgerLine]:
    """Yield the lines of the group's own ranks; `held_bytes` of the first one are in the line of an encoder."""
    for rank in pool.ranks:
        owner = rank.owner or f"{group} rank {rank.rank}"
        peak_bytes = max(rank.peak_bytes, rank.reserved_bytes)
        kept_bytes = rank.kv_bytes + rank.state_bytes + rank.adapter_bytes + rank.draft_bytes
        rest_bytes = peak_bytes - rank.weights_bytes - kept_bytes - headroom_bytes - held_bytes
        held_bytes = 0
        yield LedgerLine(pool.name, owner, "weights", rank.weights_bytes)
        yield from _adapter_line(rank, owner)
        if rank.draft_bytes:
            yield LedgerLine(pool.name, owner, "draft model", rank.draft_bytes)
        yield LedgerLine(pool.name, owner, "kv", rank.kv_bytes)
        if rank.state_bytes:
            yield LedgerLine(pool.name, owner, "state", rank.state_bytes)
        yield LedgerLine(pool.name, owner, "language activations", max(rest_bytes, 0))
        if headroom_bytes:
            yield LedgerLine(pool.name, owner, "headroom", headroom_bytes)


def _adapter_line(rank: RankMemory, owner: str) -> list[LedgerLine]:
    return [LedgerLine(rank.pool, owner, "adapters", rank.adapter_bytes)] * bool(rank.adapter_bytes)


def _share(size: int, total: int) -> str:
    return f"{100 * size / total:.1f} %" if total > 0 else ""


def _table_text(rows: Sequence[Sequence[str]], align: str) -> str:
    """Format rows as a table of plain text; `align` has `<` or `>` for each column."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    )
