"""The way to the size of the KV cache: a state machine between a memory policy and the ranks that generate.

The policy proposes, the ranks carry out and vote, and here every proposal is checked. No rank decides anything: what
does not fit in one of them fits in none, so that they never part ways between two collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NoReturn, Protocol, TypeAlias

import msgspec

from vsched.errors import (
    DeviceOutOfMemory,
    MemoryLeak,
    PolicyError,
    limit_message,
    reraise_interrupt,
    safe_text,
)
from vsched.memory.ledger import Ledger, LedgerLine, group_ledger
from vsched.policy import (
    AcceptBuild,
    Attempt,
    AttemptOutcome,
    Build,
    Fail,
    MemoryPolicy,
    MemoryView,
    Probe,
    RankMemory,
)

ATTEMPTS_MAX = 16
"""A policy that has not come to an end by then never will."""


class SizedReport(Protocol):
    """What a rank says when it has carried out an order."""

    @property
    def outcome(self) -> AttemptOutcome: ...
    @property
    def message(self) -> str: ...
    @property
    def memory(self) -> RankMemory: ...


class Accepted(msgspec.Struct, frozen=True):
    """The KV cache that stands in every rank is the one to serve with."""

    tokens: int
    blocks: int


Order: TypeAlias = Probe | Build | Accepted


class KvNegotiation:
    """Asks the policy, hands out orders, and takes the reports of all ranks after each.

    The ranks may be those of several groups, which then get the same. The orders are in whole blocks. Once `Accepted`
    is returned or an error is raised, it is over. What follows the view is for the ledger, see `group_ledger`; `note`
    goes into errors.
    """

    def __init__(
        self,
        policy: MemoryPolicy,
        view: MemoryView,
        *,
        encoders: Sequence[RankMemory] = (),
        together: bool = False,
        more: Sequence[LedgerLine] = (),
        owner: str = "generate",
        encoder_names: Sequence[str] = (),
        note: str = "",
    ) -> None:
        assert view.ranks, "a group has a rank"
        assert not view.attempts, "a negotiation starts without attempts"
        self._policy = policy
        # Tuples: the view is kept between the calls of the policy, which cannot change it.
        self.view = msgspec.structs.replace(
            view, ranks=tuple(view.ranks), reservations=tuple(view.reservations), attempts=()
        )
        self.failure: Fail | None = None
        self._order: Order | None = None
        self._encoders, self._together, self._more = encoders, together, more
        self._owner, self._encoder_names = owner, encoder_names
        self._note = note

    def start(self) -> Order:
        """Return the first order.

        Raises:
            DeviceOutOfMemory: When the policy gives up; the message quotes the ledger.
            PolicyError: When the policy raises or answers nonsense; no default could know the device better.
        """
        assert self._order is None, "started twice"
        return self._ask()

    def take(self, reports: Sequence[SizedReport]) -> Order:
        """Take the reports of all ranks on the last order, and return the next.

        Raises:
            DeviceOutOfMemory: When the policy gives up; the message quotes the ledger.
            MemoryLeak: When memory of an earlier attempt did not come back.
            PolicyError: When the policy raises or answers nonsense.
        """
        order = self._order
        assert isinstance(order, Probe | Build), "no order is out"
        ranks = tuple(sorted((one.memory for one in reports), key=lambda memory: memory.rank))
        wanted = sorted(memory.rank for memory in self.view.ranks)
        assert [memory.rank for memory in ranks] == wanted, f"not one report of each rank: {ranks}"
        outcome = vote([report.outcome for report in reports])
        attempt = Attempt(
            action="probe" if isinstance(order, Probe) else "build",
            tokens=order.tokens,
            outcome=outcome,
            message=_reason(reports, outcome),
            ranks=ranks,
            headroom_bytes=order.headroom_bytes if isinstance(order, Build) else 0,
            profile=order.profile if isinstance(order, Build) else True,
        )
        attempts = (*self.view.attempts, attempt)
        self.view = msgspec.structs.replace(self.view, attempts=attempts)
        return self._ask()

    def ledger(self) -> Ledger:
        """Return the ledger at the peak of the last attempt, or after loading before there is one."""
        attempt = self.view.attempts[-1] if self.view.attempts else None
        return group_ledger(
            self.view,
            attempt,
            encoders=self._encoders,
            together=self._together,
            more=self._more,
            owner=self._owner,
            encoder_names=self._encoder_names,
        )

    def _ask(self) -> Order:
        try:
            answer = self._policy.plan(self.view)
        except BaseException as error:
            reraise_interrupt(error)
            raise PolicyError(f"{self._name()} failed: {safe_text(error)}") from error
        match answer:
            case Fail():
                self._fail(answer)
            case _ if self._last_outcome() == "leak":
                self._fail(Fail(_gone_on(self.view.attempts[-1]), leak=True))
            case Probe() | Build():
                self._order = self._checked(answer)
            case AcceptBuild():
                self._order = self._accepted()
            case _:
                raise PolicyError(
                    f"{self._name()} returned {safe_text(answer)}, which is none of Probe, Build, AcceptBuild and Fail"
                )
        return self._order

    def _checked(self, answer: Probe | Build) -> Probe | Build:
        """Return the order in whole blocks, or refuse what cannot be meant."""
        view = self.view
        headroom_bytes = answer.headroom_bytes if isinstance(answer, Build) else 0
        try:
            tokens, headroom_bytes = operator.index(answer.tokens), operator.index(headroom_bytes)
        except TypeError as error:
            raise PolicyError(f"{self._name()} returned {answer!r}: {error}") from error
        tokens_min = max(view.tokens_min, view.block_size)
        total_bytes = min(rank.total_bytes for rank in view.ranks)
        kv_bytes = tokens * view.bytes_per_token
        faults = {
            "it comes to no end": (
                len(view.attempts) >= ATTEMPTS_MAX,
                f"{len(view.attempts)} attempts behind it",
                f"{ATTEMPTS_MAX} attempts",
                "return AcceptBuild or Fail, judging by view.attempts",
            ),
            "its headroom is below nothing": (
                headroom_bytes < 0,
                f"{headroom_bytes} bytes",
                "0 bytes or more",
                "return headroom of 0 bytes for none",
            ),
            "a KV cache needs more tokens": (
                tokens < tokens_min,
                f"{tokens} tokens",
                f"at least {tokens_min} tokens",
                "return Fail where there is no room for a block",
            ),
            "it does not fit on an empty device": (
                kv_bytes + headroom_bytes > total_bytes,
                f"{kv_bytes} bytes of KV and {headroom_bytes} of headroom",
                f"{total_bytes} bytes",
                "propose what the ranks in the view have room for",
            ),
        }
        for fault, (is_so, value, limit, remedy) in faults.items():
            if is_so:
                what = f"{self._name()} returned {answer!r}, but {fault}"
                raise PolicyError(limit_message(what, value=value, limit=limit, remedy=remedy))
        return msgspec.structs.replace(answer, tokens=tokens // view.block_size * view.block_size)

    def _accepted(self) -> Accepted:
        attempts = self.view.attempts
        if not attempts or attempts[-1].action != "build" or attempts[-1].outcome != "fits":
            last = f"{attempts[-1].action}: {attempts[-1].outcome}" if attempts else "none"
            raise PolicyError(
                limit_message(
                    f"{self._name()} accepts what does not stand",
                    value=f"last attempt {last}",
                    limit="a build that fits",
                    remedy="return AcceptBuild only when view.attempts ends so",
                )
            )
        tokens = attempts[-1].tokens
        return Accepted(tokens, tokens // self.view.block_size)

    def _fail(self, failure: Fail) -> NoReturn:
        self.failure = failure
        message = f"{failure.message}{self._note} Memory of {self.ledger().summary()}."
        if failure.leak or self._last_outcome() == "leak":
            raise MemoryLeak(message)
        raise DeviceOutOfMemory(message)

    def _last_outcome(self) -> AttemptOutcome | None:
        return self.view.attempts[-1].outcome if self.view.attempts else None

    def _name(self) -> str:
        return f"generate.memory: {type(self._policy).__name__}.plan"


def vote(outcomes: Sequence[AttemptOutcome]) -> AttemptOutcome:
    """Return the outcome of the group: a leak anywhere is a leak, out of memory anywhere is out of memory."""
    if "leak" in outcomes:
        return "leak"
    return "out_of_memory" if "out_of_memory" in outcomes else "fits"


def _reason(reports: Sequence[SizedReport], outcome: AttemptOutcome) -> str:
    """Quote the first rank that voted so, without its remedy: the policy knows the better one."""
    voices = sorted(
        (report.memory.rank, report.memory.name, report.message)
        for report in reports
        if report.outcome == outcome and report.message
    )
    if not voices:
        return ""
    _, name, message = voices[0]
    others = f", and {len(voices) - 1} more" if len(voices) > 1 else ""
    return f"{name}{others}: {message.partition(' Remedy: ')[0]}"


def _gone_on(attempt: Attempt) -> str:
    return limit_message(
        f"generate.memory: memory leaked before the {attempt.action} of {attempt.tokens} tokens "
        f"({attempt.message}), and the policy would have gone on",
        value="a leak",
        limit="none",
        remedy="find out what still refers to the KV cache; a smaller one would leak too",
    )
