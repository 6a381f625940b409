"""Policies with a state that every decision depends on; some fail with their state half changed."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import msgspec

from vsched.policy import (
    Admission,
    AdmissionView,
    EncodingView,
    ImagePolicy,
    PreemptionView,
    RequestPolicy,
    RoutingPolicy,
    RoutingView,
)
from vsched.policy.measured import Measured


class Recent(msgspec.Struct):
    """Subjects of the last calls."""

    sizes: list[int] = []
    place: tuple[int, str] = (0, "")


class Tally(msgspec.Struct):
    """State of these policies: a field of every kind that can be kept."""

    calls: int = 0
    share: float = 0.0
    note: str | None = None
    seen: dict[str, int] = {}
    recent: Recent = msgspec.field(default_factory=Recent)

    def count(self, what: str, size: int) -> int:
        """Count a call; return a number that depends on all calls before."""
        self.calls += 1
        self.share += (size - self.share) / 4
        self.note = what if self.calls % 2 else None
        self.seen.pop(what, None)
        self.seen[what] = self.seen.get(what, 0) + size  # it becomes the last
        self.recent.sizes = [*self.recent.sizes[-3:], size]
        self.recent.place = (size, what)
        return self.calls + int(self.share) + next(iter(self.seen.values()))

    def fail_at(self, every: int) -> None:
        """Fail in every n-th call, 0 for never."""
        if every and self.calls % every == 0:
            raise RuntimeError("a bug in the policy")


def digest(measured: Measured) -> int:
    """Return a small number to which all measurements contribute."""
    reported = [
        list(map(msgspec.structs.astuple, window))
        for window in (measured.steps, measured.encodes, measured.first_tokens, measured.ends)
    ]
    counts = [
        measured.blocks_total,
        measured.blocks_held,
        measured.blocks_cached,
        measured.tokens_prefilled,
        measured.tokens_cached,
        *measured.tokens_running.values(),
        measured.embedding_hits,
        measured.embedding_misses,
    ]
    return crc32(msgspec.msgpack.encode([reported, counts])) % 1000


class TalliedAdmission(RequestPolicy, frozen=True, kw_only=True):
    """Admits a number that depends on its state, from the front or from the back."""

    state_type = Tally
    fails: int = 0

    def admit(self, view: AdmissionView) -> Admission:
        state: Tally = view.state
        number = state.count(view.stage, len(view.waiting) + digest(view.measured))
        state.fail_at(self.fails)
        order = range(len(view.waiting))
        chosen = order if number % 3 else order[::-1]
        return Admission(list(chosen)[: 1 + number % max(view.entries_free, 1)])


class TalliedEncoding(ImagePolicy, frozen=True, kw_only=True):
    """Encodes ahead by a number that depends on its state."""

    state_type = Tally
    fails: int = 0

    def select(self, view: EncodingView) -> Sequence[int]:
        state: Tally = view.state
        number = state.count(str(view.arriving), view.prompt_tokens + digest(view.measured))
        state.fail_at(self.fails)
        return [index for index, item in enumerate(view.items) if not item.ready][: number % 3]


class TalliedPreemption(RequestPolicy, frozen=True, kw_only=True):
    """The victim follows from the calls before."""

    state_type = Tally
    fails: int = 0

    def victim(self, view: PreemptionView) -> int:
        state: Tally = view.state
        number = state.count("victim", len(view.running) + digest(view.measured))
        state.fail_at(self.fails)
        return number % len(view.running)


class TalliedRouting(RoutingPolicy, frozen=True, kw_only=True):
    """A healthy replica that follows from the calls before."""

    state_type = Tally
    fails: int = 0

    def choose(self, view: RoutingView) -> int:
        state: Tally = view.state
        all_measured = [view.measured, *(replica.measured for replica in view.replicas)]
        number = state.count(str(len(view.item_keys)), sum(map(digest, all_measured)))
        state.fail_at(self.fails)
        healthy = [replica.index for replica in view.replicas if replica.healthy]
        return healthy[number % len(healthy)] if healthy else 0
