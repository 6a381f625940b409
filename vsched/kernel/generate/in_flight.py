"""Generate steps that are out: what they read, whose first token they bring, what they left behind.

A decision may go out while the step before is still running, so the kernel plans on results that it has not seen. This
is the one place that knows the difference between what is decided (`planned`) and what has happened (`done`).
"""

from __future__ import annotations

from array import array

from vsched.kernel.decisions import ChunkPlan
from vsched.kernel.generate.token_log import TokenLog
from vsched.kernel.request import RequestState


class InFlightSteps:
    """Steps up to `planned` are decided, those up to `done` are back."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.done = planned
        self._log = TokenLog()
        self._reads: dict[int, list[tuple[RequestState, ChunkPlan]]] = {}
        self._firsts: dict[int, list[RequestState]] = {}
        self._settling: dict[int, tuple[RequestState, int, int]] = {}

    @property
    def out(self) -> int:
        """Steps whose results are not back."""
        return self.planned - self.done

    @property
    def settling(self) -> int:
        """Preempted requests whose last step is out."""
        return len(self._settling)

    def note_read(self, step: int, state: RequestState, plan: ChunkPlan) -> None:
        """A chunk of this step reads embeddings: they stay until it is back."""
        self._reads.setdefault(step, []).append((state, plan))

    def note_first(self, step: int, state: RequestState) -> None:
        """This step brings a request's first token (of this life)."""
        self._firsts.setdefault(step, []).append(state)

    def firsts(self, step: int) -> int:
        """Return how many requests get their first token in this step."""
        return len(self._firsts.get(step, ())) if self._firsts else 0

    def land(
        self, step: int, tokens: array[int], now_ns: int
    ) -> list[tuple[RequestState, ChunkPlan]]:
        """Take the oldest step that is out; return the chunks that read embeddings in it."""
        assert step == self.done + 1, f"step {step} came back, {self.done + 1} was due"
        assert step <= self.planned, f"step {step} came back, {self.planned} is the last decided"
        self.done = step
        self._log.append(step, tokens)
        if self._firsts:
            for state in self._firsts.pop(step, ()):
                if not state.first_token_ns:
                    state.first_token_ns = now_ns
        return self._reads.pop(step, []) if self._reads else []

    def crash(self) -> list[tuple[RequestState, ChunkPlan]]:
        """Nothing that is out will come back; return the chunks that were reading embeddings."""
        return [read for step in sorted(self._reads) for read in self._reads[step]]

    def settle(self, state: RequestState, slot: int) -> None:
        """A preempted request waits for the steps that are out: they bring tokens of it."""
        self._settling[state.number] = (state, slot, self.planned)

    def oldest_settling(self) -> tuple[int, int] | None:
        """Return the place in line of the oldest request that settles."""
        return min((state.order for state, _, _ in self._settling.values()), default=None)

    def unsettle(self, state: RequestState) -> None:
        """A settling request ended."""
        self._settling.pop(state.number, None)

    def take_settled(self, *, crashed: bool = False) -> list[RequestState]:
        """Return the requests whose steps are all back, with their outputs added to their tokens."""
        settled = []
        for state, slot, last_step in list(self._settling.values()):
            if crashed or last_step <= self.done:
                del self._settling[state.number]
                self.gather(state, slot)
                settled.append(state)
        return settled

    def gather(self, state: RequestState, slot: int) -> None:
        """End a life: add the outputs that it yielded in this slot to the request's known tokens."""
        if state.first_step >= 0:
            state.tokens.extend(self._log.gather(slot, state.first_step, self.done))
            state.first_step = -1

    def trim(self, oldest: RequestState | None) -> None:
        """Forget the tokens of steps before the first step of `oldest`, the oldest decoding request."""
        needed = [state.first_step for state, _, _ in self._settling.values()]
        needed.append(self.done + 1 if oldest is None else oldest.first_step)
        self._log.forget_before(min(step for step in needed if step >= 0))
