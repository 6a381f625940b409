"""Generate steps, planned and in flight: the embeddings they read, the first tokens they yield, and the log of tokens.

A decision may be sent while the step before still runs, so the kernel plans before it has all results. Only this module
distinguishes decided steps (`planned`) from completed ones (`done`).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from vsched.kernel.decisions import ChunkPlan, GenerateDecision, Join
from vsched.kernel.events import Drafted
from vsched.kernel.generate.measures import Measures
from vsched.kernel.request import Int32Array, RequestState
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.policy_host.step_times import PrefillBudget


class ChunkRead(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that reads embeddings: the request, the end of the chunk, and the keys of the items."""

    number: int
    stop: int
    keys: list[bytes]


class InFlightSteps(Restorable):
    """Steps up to `planned` are decided, those up to `done` have completed.

    Attributes:
        preempted: By number, preempted requests whose last step has not completed: the slot that each left, and the
            last step that yields its tokens.
        reads: By step, the chunks that read embeddings, which stay in place until the step has completed.
        firsts: By step, the numbers of the requests whose first token since they joined it yields.
    """

    planned: Saved[int]
    done: Saved[int]
    preempted: Saved[dict[int, tuple[int, int]]]
    reads: Saved[dict[int, list[ChunkRead]]]
    firsts: Saved[dict[int, list[int]]]
    _log: Saved[TokenLog]

    def __init__(
        self, planned: int, requests: Mapping[int, RequestState], measures: Measures
    ) -> None:
        self.planned = planned
        self.done = planned
        self._requests = requests
        self._measures = measures
        self._log = TokenLog()
        self.reads = {}
        self.firsts = {}
        self.preempted = {}

    def complete_step(
        self, step: int, tokens: array[int], now_ns: int, drafted: Sequence[Drafted] = ()
    ) -> list[ChunkRead]:
        """Take the result of the oldest step in flight; return its chunks that read embeddings."""
        assert step == self.done + 1, f"step {step} came back, {self.done + 1} was due"
        assert step <= self.planned, f"step {step} came back, {self.planned} is the last decided"
        self.done = step
        self._log.append(step, tokens)
        if drafted:
            self._log.more[step] = {one.slot: one.tokens for one in drafted}
        if self.firsts:
            for number in self.firsts.pop(step, ()):
                state = self._requests.get(number)
                if state is not None and not state.first_token_ns:
                    state.first_token_ns = now_ns
                    self._measures.note_first_token(state)
        return self.reads.pop(step, []) if self.reads else []

    def oldest_preempted(self) -> tuple[int, int] | None:
        """Return the queue order of the oldest request that waits for its last step and for blocks that it needed.

        A request that was preempted for a waiting one does not keep others from joining.
        """
        if not self.preempted:
            return None
        states = [self._requests[number] for number in self.preempted]
        return min([one.order for one in states if not one.yielded_ns], default=None)

    def take_requeueable(self, *, crashed: bool = False) -> list[RequestState]:
        """Remove and return preempted requests whose steps have completed, with outputs added to their tokens."""
        requeueable = []
        for number, (slot, last_step) in list(self.preempted.items()):
            if crashed or last_step <= self.done:
                del self.preempted[number]
                state = self._requests[number]
                self.gather(state, slot)
                requeueable.append(state)
        return requeueable

    def gather(self, state: RequestState, slot: int) -> None:
        """Add the outputs of a request in this slot to its tokens."""
        if state.first_step >= 0:
            state.tokens.extend(self._log.gather(slot, state.first_step, self.done))
            state.first_step = -1

    def trim(self, oldest: RequestState | None) -> None:
        """Drop the tokens of steps before the first step of `oldest`, the oldest decoding request."""
        needed = [self._requests[number].first_step for number in self.preempted]
        needed.append(self.done + 1 if oldest is None else oldest.first_step)
        self._log.forget_before(min(step for step in needed if step >= 0))


class TokenLog(Restorable):
    """The token batches of past steps.

    A step appends its batch unread, so its cost does not grow with the number of running requests. The tokens of a
    request are gathered when it leaves its slot.

    Attributes:
        batches: The batches, oldest first.
        first_step: The step of the first batch.
        more: By step and slot, the accepted drafts, which follow the token in the batch.
    """

    batches: Saved[deque[Int32Array]]
    more: Saved[dict[int, dict[int, list[int]]]]
    first_step: Saved[int] = 0

    def __init__(self) -> None:
        self.batches = deque()
        self.more = {}

    def append(self, step: int, tokens: array[int]) -> None:
        """Append the batch of the next step."""
        if not self.batches:
            self.first_step = step
        assert step == self.first_step + len(self.batches), "a step's tokens are missing"
        self.batches.append(tokens)

    def gather(self, slot: int, first_step: int, last_step: int) -> array[int]:
        """Return the tokens of a slot over the steps [first_step, last_step]."""
        if self.more:
            return self._gather_more(slot, first_step, last_step)
        steps = islice(self.batches, first_step - self.first_step, last_step - self.first_step + 1)
        return array("i", [batch[slot] for batch in steps])

    def _gather_more(self, slot: int, first_step: int, last_step: int) -> array[int]:
        tokens = array("i")
        for step in range(first_step, last_step + 1):
            tokens.append(self.batches[step - self.first_step][slot])
            tokens.extend(self.more.get(step, {}).get(slot, ()))
        return tokens

    def forget_before(self, step: int) -> None:
        """Drop the batches of earlier steps."""
        while self.batches and self.first_step < step:
            self.batches.popleft()
            if self.more:
                self.more.pop(self.first_step, None)
            self.first_step += 1


@dataclass(slots=True)
class StepPlan:
    """A step that is being planned."""

    step: int
    budget: PrefillBudget
    joined: list[Join] = field(default_factory=list)
    chunks: list[ChunkPlan] = field(default_factory=list)
    prefilled: list[RequestState] = field(default_factory=list)


class PlanResult(msgspec.Struct, frozen=True):
    """Result of planning a step.

    Attributes:
        decision: The step; None if there is no work, or enough is in flight.
        requeued: Requests to put back into the queue: preempted, or without their embeddings.
        prefilled: Requests with a chunk in this step.
        more: Whether to plan again although the group has not changed: another step may follow this one, or a policy
            that let no request continue may decide otherwise after the next event.
    """

    decision: GenerateDecision | None = None
    requeued: Sequence[RequestState] = ()
    prefilled: Sequence[RequestState] = ()
    more: bool = False


NOTHING_PLANNED = PlanResult()
