"""The memory of devices: pools, its ledger, and the negotiation of the KV cache's size. Pure: no I/O, no clock.

Each of two ranks on one device sees the memory of the other as not available; counted rank by rank, each would be a
peer of the other. So shared memory is counted once for each pool.

In a negotiation, the memory policy yields a probe or a build, all ranks carry it out and vote, and the policy gets the
result. Every order is checked here. No rank decides anything: a size that does not fit on one rank is dropped by all,
so that no rank waits in a collective that another has left.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import msgspec

from vsched.errors import (
    DeviceOutOfMemory,
    MemoryLeak,
    PolicyError,
    limit_message,
    reraise_interrupt,
    safe_text,
)
from vsched.policy import (
    Attempt,
    AttemptOutcome,
    Build,
    MemoryPlan,
    MemoryPolicy,
    MemoryView,
    Probe,
    RankMemory,
    Reservation,
)

_UNITS = ((1 << 30, "GiB", 2), (1 << 20, "MiB", 1), (1 << 10, "KiB", 1))


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One memory and the ranks of the group that share it.

    Attributes:
        unheld_bytes: Memory that encode ranks will need of it and do not hold yet.
    """

    name: str
    ranks: tuple[RankMemory, ...]
    unheld_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Size of the pool; the ranks should agree, and the smallest counts."""
        return min(rank.total_bytes for rank in self.ranks)

    @property
    def available_bytes(self) -> int:
        """Free memory, as measured by the rank that saw the least."""
        return min(rank.available_bytes for rank in self.ranks)

    @property
    def peers_bytes(self) -> int:
        """Memory held by processes that are not of this group."""
        own_bytes = sum(rank.reserved_bytes for rank in self.ranks)
        return max(self.total_bytes - self.available_bytes - own_bytes, 0)


def group_pools(ranks: Sequence[RankMemory], reservations: Sequence[Reservation]) -> list[Pool]:
    """Group ranks by pool, in the order of their first rank."""
    names = list(dict.fromkeys(rank.pool for rank in ranks))
    return [
        Pool(
            name=name,
            ranks=tuple(rank for rank in ranks if rank.pool == name),
            unheld_bytes=sum(
                reservation.growth_bytes
                for reservation in reservations
                if reservation.pool == name and not reservation.held
            ),
        )
        for name in names
    ]


def on_host(pool: str) -> bool:
    """Whether a pool is the host's memory, or a limit on a process in it."""
    return pool == "cpu" or pool.startswith("cpu limit of ")


class HostShares:
    """Limits of the pools of a host, chosen so that all pools can reach them at the same time.

    A rank on a CPU measures its own limit, which ignores the limits of others: together they may be more than the host
    has. So the memory that is free when all have loaded, without the `kept_bytes` of others, is divided equally. A
    limit below the share stays as it is. Ranks on other devices are not limited.
    """

    def __init__(
        self, ranks: Sequence[RankMemory], free_bytes: int, *, kept_bytes: int = 0
    ) -> None:
        hosted = [rank for rank in ranks if on_host(rank.pool)]
        self._free_bytes, self._kept_bytes = free_bytes, kept_bytes
        self._share_bytes = max(free_bytes - kept_bytes, 0) // max(len(hosted), 1)
        self._totals: dict[str, int] = {}
        for rank in hosted:
            grown_bytes = rank.reserved_bytes + self._share_bytes
            self._totals[rank.pool] = self._totals.get(rank.pool, 0) + grown_bytes
        self._limited = [rank.name for rank in hosted if self._totals[rank.pool] < rank.total_bytes]

    def within(self, ranks: Sequence[RankMemory]) -> list[RankMemory]:
        """Return measurements of all ranks as if their memories were no larger than their shares."""
        found = []
        for rank in ranks:
            total_bytes = self._totals.get(rank.pool, rank.total_bytes)
            if total_bytes < rank.total_bytes:
                held_bytes = sum(one.reserved_bytes for one in ranks if one.pool == rank.pool)
                free_bytes = min(rank.available_bytes, max(total_bytes - held_bytes, 0))
                rank = msgspec.structs.replace(
                    rank, total_bytes=total_bytes, available_bytes=free_bytes
                )
            found.append(rank)
        return found

    def limit_note(self) -> str:
        """Return a sentence for an error message if a share is less than a limit; otherwise nothing."""
        if not self._limited:
            return ""
        return (
            f" The host has {size_text(self._free_bytes)} free, and keeps {size_text(self._kept_bytes)} for images, "
            f"encoders and swapped blocks: {', '.join(self._limited)} may take {size_text(self._share_bytes)} each. "
            "Lower arena.pixel_bytes, arena.embedding_bytes, media.decode_bytes or generate.swap_memory to leave more."
        )


def size_text(size: int) -> str:
    """Format a size for people, in the largest unit that it reaches."""
    for unit, name, digits in _UNITS:
        if abs(size) >= unit:
            return f"{size / unit:.{digits}f} {name}"
    return f"{size} bytes"


class LedgerLine(msgspec.Struct, frozen=True):
    """The bytes of a pool that one owner uses for one thing, such as `weights`, `kv` or `peers`; see docs/memory.md."""

    pool: str
    owner: str
    line: str
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

    def render(self) -> str:
        """Draw the table."""

        def share(size: int, total: int) -> str:
            return f"{100 * size / total:.1f} %" if total > 0 else ""

        rows = [("pool and owner", "line", "size", "share")]
        for pool, total_bytes in self.totals.items():
            rows.append((pool, "total", size_text(total_bytes), ""))
            rows += [
                (
                    f"  {line.owner}",
                    line.line,
                    size_text(line.bytes),
                    share(line.bytes, total_bytes),
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
        if rank.adapter_bytes:
            lines.append(LedgerLine(rank.pool, name, "adapters", rank.adapter_bytes))
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
        facts = msgspec.structs.asdict(attempt)
        yield SizingPhase(owner=group, retry=failed[attempt.action], **facts)
        failed[attempt.action] += attempt.outcome != "fits"


def _pool_lines(
    pool: Pool, group: str, headroom_bytes: int, held_bytes: int
) -> Iterator[LedgerLine]:
    """Yield the lines of the group's own ranks; `held_bytes` of the first one are in the line of an encoder."""
    always = ("weights", "kv", "language activations")
    for rank in pool.ranks:
        sizes: dict[str, int] = {
            "weights": rank.weights_bytes,
            "adapters": rank.adapter_bytes,
            "draft model": rank.draft_bytes,
            "kv": rank.kv_bytes,
            "state": rank.state_bytes,
        }
        peak_bytes = max(rank.peak_bytes, rank.reserved_bytes)
        rest_bytes = peak_bytes - sum(sizes.values()) - headroom_bytes - held_bytes
        sizes["language activations"] = max(rest_bytes, 0)
        sizes["headroom"] = headroom_bytes
        held_bytes, owner = 0, rank.owner or f"{group} rank {rank.rank}"
        for name, size in sizes.items():
            if size or name in always:
                yield LedgerLine(pool.name, owner, name, size)


def _table_text(rows: Sequence[Sequence[str]], align: str) -> str:
    """Format rows as a table of plain text; `align` has `<` or `>` for each column."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ).rstrip()
        for row in rows
    )


ATTEMPTS_MAX = 16
"""Maximum number of attempts of a policy."""


class Sized(msgspec.Struct, frozen=True, tag=True):
    """A rank's vote on the last order, and its measurements; `message` is an error without its remedy."""

    outcome: AttemptOutcome
    message: str
    memory: RankMemory


class Accepted(msgspec.Struct, frozen=True):
    """Serve with the KV cache that stands in every rank."""

    tokens: int
    blocks: int


Order: TypeAlias = Probe | Build | Accepted


class KvNegotiation:
    """Runs a memory policy: returns its orders, and sends it the combined reports of all ranks.

    The ranks may be those of several groups, which then get equal sizes. Orders are in whole blocks. `Accepted` or an
    error ends the negotiation. Errors quote the result of `ledger`, followed by `limit_note`.

    Attributes:
        view: The policy's view.
        attempts: All attempts so far, oldest first.
    """

    def __init__(
        self,
        policy: MemoryPolicy,
        view: MemoryView,
        *,
        ledger: Callable[[MemoryView, Sequence[Attempt]], Ledger] = group_ledger,
        note: str = "",
    ) -> None:
        assert view.ranks, "a group has a rank"
        # Tuples: the policy keeps the view, and cannot change it.
        self.view = msgspec.structs.replace(
            view, ranks=tuple(view.ranks), reservations=tuple(view.reservations)
        )
        self.attempts: tuple[Attempt, ...] = ()
        self._policy = policy
        self._plan: MemoryPlan | None = None
        self._order: Order | None = None
        self._ledger, self._note = ledger, note
        self._name = f"generate.memory: {type(policy).__name__}.plan"

    def first_order(self) -> Order:
        """Return the first order.

        Raises:
            DeviceOutOfMemory: If the policy gives up; the message quotes the ledger.
            PolicyError: If the policy raises anything else or yields an invalid value; there is no default that knows
                the device better.
        """
        assert self._plan is None, "started twice"
        try:
            plan = self._policy.plan(self.view)
        except BaseException as error:
            raise self._failure(error) from error
        if not isinstance(plan, Generator):
            raise PolicyError(
                f"{self._name} returned {safe_text(plan)}, which is not a generator. Remedy: yield Probe and Build, "
                "and return once the last Build fits."
            )
        self._plan = plan
        return self._resume_policy(None)

    def next_order(self, reports: Sequence[Sized]) -> Order:
        """Take the reports of all ranks on the last order, and return the next.

        Raises:
            DeviceOutOfMemory: If the policy gives up; the message quotes the ledger.
            MemoryLeak: If memory of an earlier attempt was not released: a smaller KV cache would leak too.
            PolicyError: If the policy raises anything else or yields an invalid value.
        """
        order, self._order = self._order, None
        assert isinstance(order, Probe | Build), "no order is out"
        ranks = tuple(sorted((one.memory for one in reports), key=lambda memory: memory.rank))
        wanted = sorted(memory.rank for memory in self.view.ranks)
        assert [memory.rank for memory in ranks] == wanted, f"not one report of each rank: {ranks}"
        outcome = vote([report.outcome for report in reports])
        attempt = Attempt(
            action="probe" if isinstance(order, Probe) else "build",
            tokens=order.tokens,
            outcome=outcome,
            message=_message(reports, outcome),
            ranks=ranks,
            headroom_bytes=order.headroom_bytes if isinstance(order, Build) else 0,
            profile=order.profile if isinstance(order, Build) else True,
        )
        short = self._no_room(attempt)
        if short:
            attempt = msgspec.structs.replace(attempt, outcome="out_of_memory", message=short)
        self.attempts = (*self.attempts, attempt)
        if outcome == "leak":
            self._stop()
            message = (
                f"generate.memory: memory leaked: the teardown before the {attempt.action} of {attempt.tokens} tokens "
                f"left some behind. {attempt.message}. Remedy: report it as a fault of the worker plug-in, which still "
                "refers to it: a smaller KV cache would leak too. Until it is mended, give the size with "
                'generate.memory = {use = "pinned", tokens = ...}, which needs no teardown'
            )
            raise MemoryLeak(self._with_ledger(message))
        return self._resume_policy(attempt)

    def ledger(self) -> Ledger:
        """Return the ledger at the peak of the last attempt, or after loading before there is one."""
        return self._ledger(self.view, self.attempts)

    def _resume_policy(self, attempt: Attempt | None) -> Order:
        """Resume the policy until it yields or ends."""
        assert self._plan is not None
        try:
            # A generator that has not started takes nothing but None.
            answer = next(self._plan) if attempt is None else self._plan.send(attempt)
        except StopIteration as end:
            if end.value is not None:
                raise PolicyError(
                    f"{self._name} returned {safe_text(end.value)}. Remedy: yield Probe and Build, and return nothing "
                    "once the last Build fits."
                ) from None
            self._order = self._accepted()
        except BaseException as error:
            raise self._failure(error) from error
        else:
            try:
                self._order = self._checked(answer)
            except PolicyError:
                self._stop()
                raise
        return self._order

    def _checked(self, answer: object) -> Probe | Build:
        """Return the order in whole blocks, or refuse an invalid one."""
        if not isinstance(answer, Probe | Build):
            raise PolicyError(
                f"{self._name} yielded {safe_text(answer)}, which is neither Probe nor Build"
            )
        view, text = self.view, safe_text(answer)
        headroom_bytes = answer.headroom_bytes if isinstance(answer, Build) else 0
        try:
            tokens, headroom_bytes = operator.index(answer.tokens), operator.index(headroom_bytes)
        except BaseException as error:
            reraise_interrupt(error)
            raise PolicyError(f"{self._name} yielded {text}: {safe_text(error, str)}") from error
        tokens_min, total_bytes = view.tokens_min, min(rank.total_bytes for rank in view.ranks)
        kv_bytes = tokens * view.bytes_per_token
        faults = {
            "it does not end": (
                len(self.attempts) >= ATTEMPTS_MAX,
                f"{len(self.attempts)} attempts behind it",
                f"{ATTEMPTS_MAX} attempts",
                "return once a Build fits, or raise DeviceOutOfMemory",
            ),
            "its headroom is negative": (
                headroom_bytes < 0,
                f"{headroom_bytes} bytes",
                "0 bytes or more",
                "yield headroom of 0 bytes for none",
            ),
            "a KV cache needs more tokens": (
                tokens < tokens_min,
                f"{tokens} tokens",
                f"at least {tokens_min} tokens",
                "raise DeviceOutOfMemory if there is no room for a block",
            ),
            "it does not fit on an empty device": (
                kv_bytes + headroom_bytes > total_bytes,
                f"{kv_bytes} bytes of KV and {headroom_bytes} of headroom",
                f"{total_bytes} bytes",
                "ask for a size that the ranks in the view have room for",
            ),
        }
        for fault, (is_so, value, limit, remedy) in faults.items():
            if is_so:
                what = f"{self._name} yielded {text}, but {fault}"
                raise PolicyError.of_limit(
                    what,
                    value=value,
                    limit=limit,
                    remedy=remedy,
                )
        tokens = tokens // view.block_size * view.block_size
        if isinstance(answer, Probe):
            return Probe(tokens)
        return Build(tokens, profile=answer.profile is not False, headroom_bytes=headroom_bytes)

    def _accepted(self) -> Accepted:
        """Accept the build that stands, when the policy has ended."""
        last = self.attempts[-1] if self.attempts else None
        if last is None or last.action != "build":
            raise PolicyError.of_limit(
                f"{self._name} ended without a build",
                value="no attempt" if last is None else f"last attempt a {last.action}",
                limit="a build that fits",
                remedy="yield a Build last",
            )
        if not last.fits:
            peak, view = last.tightest, self.view
            message = limit_message(
                f"generate.memory: memory ran out on {peak.pool} ({last.reason})",
                value=f"{last.tokens} tokens ({size_text(last.tokens * view.bytes_per_token)})",
                limit=f"total {size_text(peak.total_bytes)}",
                remedy=f"lower generate.memory.mem_fraction (now {self._policy.mem_fraction:g}), "
                'or set generate.memory.use = "auto-profile", which measures',
            )
            raise DeviceOutOfMemory(self._with_ledger(message))
        return Accepted(last.tokens, last.tokens // self.view.block_size)

    def _no_room(self, build: Attempt) -> str:
        """Explain why a build that fits leaves too little for the encoders; empty if it leaves enough.

        Steps were run while the encoders held nothing of it.
        """
        if build.action != "build" or not build.fits:
            return ""
        for pool in group_pools(build.ranks, self.view.reservations):
            peaks = [max(rank.peak_bytes, rank.reserved_bytes) for rank in pool.ranks]
            own_bytes = sum(peaks) - build.headroom_bytes * len(peaks)
            left_bytes = pool.total_bytes - pool.peers_bytes - own_bytes
            if pool.unheld_bytes > max(left_bytes, 0):
                return (
                    f"{pool.name}: {size_text(max(left_bytes, 0))} are left, and encode ranks need "
                    f"{size_text(pool.unheld_bytes)}"
                )
        return ""

    def _failure(self, error: BaseException) -> DeviceOutOfMemory | PolicyError:
        """Return the error to raise for one that the policy raised."""
        reraise_interrupt(error)
        if isinstance(error, DeviceOutOfMemory):
            return DeviceOutOfMemory(self._with_ledger(safe_text(error, str)))
        return PolicyError(f"{self._name} failed: {safe_text(error)}")

    def _stop(self) -> None:
        """Close the policy's generator, which may object."""
        try:
            if self._plan is not None:
                self._plan.close()
        except BaseException as error:  # noqa: BLE001 - there is a fault to report already
            reraise_interrupt(error)

    def _with_ledger(self, message: str) -> str:
        return f"{message}{self._note} Memory of {self.ledger().summary()}."


def vote(outcomes: Sequence[AttemptOutcome]) -> AttemptOutcome:
    """Return the outcome of the group: a leak anywhere is a leak, out of memory anywhere is out of memory."""
    if "leak" in outcomes:
        return "leak"
    return "out_of_memory" if "out_of_memory" in outcomes else "fits"


def _message(reports: Sequence[Sized], outcome: AttemptOutcome) -> str:
    """Quote the first rank with this outcome."""
    voices = sorted(
        (report.memory.rank, report.memory.name, report.message)
        for report in reports
        if report.outcome == outcome and report.message
    )
    if not voices:
        return ""
    _, name, message = voices[0]
    others = f", and {len(voices) - 1} more" if len(voices) > 1 else ""
    return f"{name}{others}: {message}"
