"""Negotiation of the KV cache's size between a memory policy and the generate ranks.

The policy yields a probe or a build, all ranks carry it out and vote, and the policy gets the result. Every order is
checked here. No rank decides anything: a size that does not fit on one rank is dropped by all, so that no rank waits in
a collective that another has left.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

import msgspec

from vsched.errors import (
    DeviceOutOfMemory,
    MemoryLeak,
    PolicyError,
    limit_message,
    reraise_interrupt,
    safe_text,
)
from vsched.memory.ledger import Ledger, group_ledger
from vsched.memory.pools import group_pools, size_text
from vsched.policy import (
    Attempt,
    AttemptOutcome,
    Build,
    MemoryPlan,
    MemoryPolicy,
    MemoryView,
    Probe,
    RankMemory,
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


class Rebuild(MemoryPolicy, frozen=True, kw_only=True):
    """Builds a KV cache of a size that was accepted before, in a restarted group; nothing is measured again."""

    tokens: int

    def plan(self, view: MemoryView) -> MemoryPlan:
        """Build the one size."""
        build = yield Build(self.tokens, profile=False)
        if not build.fits:
            raise DeviceOutOfMemory(
                limit_message(
                    "the generate group cannot build the KV cache that it had before it was lost "
                    f"({build.reason})",
                    value=f"{self.tokens} tokens",
                    limit="what is free on the device now",
                    remedy="see what else takes the device's memory, or restart the server",
                )
            )


class KvNegotiation:
    """Runs a memory policy: returns its orders, and sends it the combined reports of all ranks.

    The ranks may be those of several groups, which then get equal sizes. Orders are in whole blocks. `Accepted` or an
    error ends the negotiation. Errors quote the result of `ledger`, followed by `note`.

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

    def start(self) -> Order:
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
        return self._advance(None)

    def take(self, reports: Sequence[Sized]) -> Order:
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
            raise MemoryLeak(self._with_ledger(_leak_message(attempt)))
        return self._advance(attempt)

    def ledger(self) -> Ledger:
        """Return the ledger at the peak of the last attempt, or after loading before there is one."""
        return self._ledger(self.view, self.attempts)

    def _advance(self, attempt: Attempt | None) -> Order:
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
                raise PolicyError(limit_message(what, value=value, limit=limit, remedy=remedy))
        tokens = tokens // view.block_size * view.block_size
        if isinstance(answer, Probe):
            return Probe(tokens)
        return Build(tokens, profile=answer.profile is not False, headroom_bytes=headroom_bytes)

    def _accepted(self) -> Accepted:
        """Accept the build that stands, when the policy has ended."""
        last = self.attempts[-1] if self.attempts else None
        if last is None or last.action != "build":
            raise PolicyError(
                limit_message(
                    f"{self._name} ended without a build",
                    value="no attempt" if last is None else f"last attempt a {last.action}",
                    limit="a build that fits",
                    remedy="yield a Build last",
                )
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

        Steps were run while the encoders held nothing of it. A size that was accepted before is not checked again.
        """
        if build.action != "build" or not build.fits or isinstance(self._policy, Rebuild):
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


def _leak_message(attempt: Attempt) -> str:
    return (
        f"generate.memory: memory leaked: the teardown before the {attempt.action} of {attempt.tokens} tokens left "
        f"some behind. {attempt.message}. Remedy: report it as a fault of the worker plug-in, which still refers to "
        "it: a smaller KV cache would leak too. Until it is mended, give the size with "
        'generate.memory = {use = "pinned", tokens = ...}, which needs no teardown'
    )
