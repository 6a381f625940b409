"""Where every byte of a memory goes: one table for start-up, errors, statistics and the profile command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from vsched.memory.phases import SizingPhase, render_phases, sizing_phases
from vsched.memory.pools import Pool, group_pools, size_text, table_text
from vsched.policy import Attempt, MemoryView, RankMemory, Reservation

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

    def with_pools(self, names: Mapping[str, str]) -> Ledger:
        """Return the same with other names for these pools."""
        return Ledger(
            {names.get(pool, pool): total for pool, total in self.totals.items()},
            [
                msgspec.structs.replace(line, pool=names.get(line.pool, line.pool))
                for line in self.lines
            ],
            self.phases,
        )

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
        return table_text(rows, "<<>>")

    def render_phases(self) -> str:
        """Draw the table of the phases; empty without any."""
        return render_phases(self.phases)

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
        """Return what JSON can hold: every pool with its total and its lines, in bytes, and every phase."""
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
    attempt: Attempt | None = None,
    *,
    encoders: Sequence[RankMemory] = (),
    together: bool = False,
    more: Iterable[LedgerLine] = (),
    owner: str = "generate",
    encoder_names: Sequence[str] = (),
) -> Ledger:
    """Make the ledger of a generate group at the peak of an attempt, or as it stood after loading.

    Args:
        view: What was measured after loading, and what encode ranks reserve.
        attempt: Whose measurements count.
        encoders: What encode ranks measured after loading; without it their weights are among the peers.
        together: The encode ranks live in the processes of the generate ranks, which then count their weights too.
        more: Lines of the host or of others, such as the arena. What they name must not be among the peers.
        owner: The name of the generate group, for ranks without a name of their own.
        encoder_names: What the encode ranks are called, in the order of the reservations and of `encoders`.
    """
    ranks = view.ranks if attempt is None else attempt.ranks
    headroom_bytes = 0 if attempt is None else attempt.headroom_bytes
    apart = [] if together else list(encoders)
    totals = {rank.pool: rank.total_bytes for rank in [*apart, *ranks]}
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
    for name, rank in zip(_names(encoder_names, apart), apart, strict=False):
        lines.append(LedgerLine(rank.pool, name, "weights", rank.weights_bytes))
        lines += _adapter_line(rank, name)
    lines += [
        LedgerLine(each.pool, name, "encoder activations", each.growth_bytes)
        for name, each in zip(
            _names(encoder_names, view.reservations), view.reservations, strict=True
        )
    ]
    phases = sizing_phases(view, encoders, encoder_names, owner)
    return Ledger.balanced(totals, [*lines, *more], phases)


def _names(given: Sequence[str], ranks: Sequence[RankMemory | Reservation]) -> Sequence[str]:
    return given or [f"encode rank {one.rank}" for one in ranks]


def _pool_lines(
    pool: Pool, group: str, headroom_bytes: int, held_bytes: int
) -> Iterator[LedgerLine]:
    """Yield the lines of the group's own ranks; what an encoder holds in the first of them is a line of its own."""
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
