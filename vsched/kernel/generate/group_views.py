"""What others can ask of a generate group: sizes, counters, and where its requests are."""

from __future__ import annotations

from collections.abc import Iterable

from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.generate.blocks import BlockPool
from vsched.kernel.generate.in_flight import InFlightSteps
from vsched.kernel.generate.request_queue import RequestQueue
from vsched.kernel.generate.running import RunningSet
from vsched.kernel.generate.step_budget import StepTimeModel
from vsched.kernel.generate.swap_space import SwapSpace
from vsched.kernel.groups import Group, Loads, PlanMarks
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import Phase, RequestState


class GroupViews(Group):
    """The questions; whoever derives from it has what they are about."""

    queue: RequestQueue
    step_times: StepTimeModel
    _limits: SchedulerLimits
    _cache: EmbeddingCache
    _running: RunningSet
    _in_flight: InFlightSteps
    _pool: BlockPool
    _swap: SwapSpace
    _counts: dict[str, int]
    _known_tokens: int

    def __init__(self, name: str, index: int, marks: PlanMarks) -> None:
        self.index = index
        self._marks = marks
        self.loads: Loads | None = None  # set once all groups are there
        super().__init__(name)

    def look(self) -> None:
        self._marks.mark(self.index)
        if self.loads is not None:
            self.loads.change(self.index)

    @property
    def idle(self) -> bool:
        return not (self._running or self._in_flight.count or self._in_flight.preempted)

    @property
    def steps_in_flight(self) -> int:
        """Steps that have not completed."""
        return self._in_flight.planned - self._in_flight.done

    @property
    def decoding(self) -> int:
        """Requests that get a token in every step."""
        return len(self._running.decoding)

    @property
    def running(self) -> list[RequestState]:
        """Requests that hold a slot, oldest first."""
        return self._running.in_order()

    @property
    def slots_held(self) -> int:
        """Slots that requests hold."""
        return len(self._running)

    def slots_held_from(self, priority: int) -> int:
        """Return how many slots requests of this priority or a higher one hold."""
        running = self._running
        held = (*running.prefilling.values(), *running.decoding.values())
        return sum(one.request.priority >= priority for one in held)

    @property
    def load_tokens(self) -> int:
        """Tokens of all its requests, prompts and outputs, waiting and running."""
        return self._known_tokens + self._running.decoded(self._in_flight.planned)

    @property
    def unannounced(self) -> set[int]:
        """Requests that are gone, of which ranks learn with the next decision."""
        return self._running.unannounced

    def decode_slack_ns(self, decodes: int) -> int:
        """Return how long something else may keep `decodes` requests from their next step; 0 for no limit."""
        return int(self.step_times.left_ns(decodes))

    def explain(self, state: RequestState) -> str:
        """Return where one of its requests is, and what it waits for, in words for operators."""
        group, done = f"{self.name} is {self.status}", self._in_flight.done
        return explained(state, self._limits, self._cache, self._pool, group=group, done=done)

    def running_tokens(self) -> Iterable[tuple[str, int]]:
        """Return the tenant and the tokens so far of each running request, with those of steps in flight."""
        return self._running.tokens(self._in_flight.planned)

    def counts(self) -> dict[str, int]:
        """Return the counters, and the sizes of the KV cache."""
        return {**self._counts, **self._pool.statistics(), **self._swap.statistics()}

    def statistics(self) -> dict[str, int]:
        """Return counters and gauges of the group."""
        return {
            "load_tokens": self.load_tokens,
            "waiting": len(self.queue),
            "prefilling": len(self._running.prefilling),
            "decoding": len(self._running.decoding),
            "preempted": len(self._in_flight.preempted),
            "steps": self._in_flight.done,
            "steps_in_flight": self._in_flight.count,
            **self.counts(),
            "slots_total": self._limits.slots,
        }


def explained(
    state: RequestState,
    limits: SchedulerLimits,
    cache: EmbeddingCache,
    pool: BlockPool,
    *,
    group: str,
    done: int,
) -> str:
    """Return where a request is, and what it waits for.

    `group` says how its group is, and `done` is the last step there that has completed.
    """
    match state.phase:
        case Phase.ITEMS:
            wanted = sorted(state.wanted)
            missing = [one for one in wanted if not cache.is_ready(state.items[one].key)]
            return f"{state.phase}: items {missing} of {len(state.items)} are not encoded yet"
        case Phase.READY:
            need = limits.blocks_for(len(state.tokens))
            return f"{state.phase}: needs {need} KV blocks, {pool.available} available"
        case Phase.PREFILL:
            return f"{state.phase}: {state.computed} of {len(state.tokens)} tokens in slot {state.slot}"
        case Phase.DECODE:
            outputs = max(0, done - state.decoding_since + 1)
            return f"{state.phase}: {outputs} tokens since it joined slot {state.slot}"
        case Phase.SUSPENDED:
            return f"{state.phase}: {group}"
        case _:
            return str(state.phase)
