"""Groups of ranks that model only the duration of steps, without memory, tokens or processes.

A sequence yields a token in every step from the one with its last chunk until it ends, and a
decision contains only changes. So the last step of a sequence is known when it starts to decode,
and the sequence is not visited before then: a steady step costs the same for any number of
sequences. Context lengths all grow by one per step, so their sum is a constant plus the number of
sequences times the step number.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random

import msgspec

from vsched.errors import ConfigError
from vsched.failures import LostTooOften, Simulated
from vsched.kernel.decisions import (
    Decision,
    EncodeDecision,
    GenerateDecision,
    Join,
)
from vsched.kernel.events import (
    Encoded,
    Event,
    Finished,
    GroupLost,
    GroupReady,
    GroupRetired,
    Stepped,
)
from vsched.policy.requests import pairs_of
from vsched.sim.cost.calibration import Span, united
from vsched.sim.cost.model import CostModel
from vsched.sim.fast.metrics import LiveRequest, Sketch
from vsched.sim.workload.requests import OUTPUT_TOKEN
from vsched.types import FinishReason

EMPTY_STEP_NS = 20_000.0
"""Duration of a step without work."""
NOTHING_SWAPPED = (0, 0)
NOISE_LEAST = 0.1
"""Minimum duration of a step after noise, as a share of its nominal duration."""


class SharedDevice:
    """Executes one step at a time, for one group or for two that share their processes.

    Attributes:
        running: The group whose step is running.
        ready: Groups with pending decisions, in the order of the decisions.
    """

    __slots__ = ("ready", "running")

    def __init__(self) -> None:
        self.running: SimulatedGroup | None = None
        self.ready: deque[SimulatedGroup] = deque()


def make_devices(
    encoders: Sequence[str], generators: Sequence[str], *, together: bool
) -> dict[str, SharedDevice]:
    """Return the device of each group; with `together`, an encode and a generate group share one."""
    devices = {name: SharedDevice() for name in encoders}
    if together:
        pairs = zip(encoders, generators, strict=True)
        return devices | {generator: devices[encoder] for encoder, generator in pairs}
    return devices | {name: SharedDevice() for name in generators}


class SharedWork:
    """A step or a job; an end announced with an earlier `incarnation` is void.

    Attributes:
        process: The process it runs in: work of the same process does not slow it down.
    """

    process: object
    incarnation = 0


class SimulatedGroup(SharedWork):
    """One group; computes when each step ends or pauses, and the resulting event.

    Attributes:
        log: Pending decisions, each with the time it was decided; the first one is running if the
            device runs this group.
        incarnation: Counts losses and rescheduled ends; an end announced in an earlier incarnation
            is void.
        steps: Number of completed steps; `busy_ns` is the time in them and in the time slices of a
            paused one.
    """

    def __init__(self, name: str, cost: CostModel, device: SharedDevice, rng: Random) -> None:
        self.name = name
        self.process = self.device = device
        self.log: deque[tuple[Decision, int]] = deque()
        self.steps = 0
        self.busy_ns = 0
        self._cost = cost
        self._decision_ns, self._gap_ns = int(cost.host.decision_ns), int(cost.host.gap_ns)
        self._noise = cost.noise
        self._cold = cost.host.cold
        self._rng = rng
        self._start_ns = self._took_ns = 0
        self._left_ns = 0.0

    def decide(self, decision: Decision, now_ns: int) -> int:
        """Take a decision; return the end of its step, or 0 if it cannot start yet."""
        self.log.append((decision, now_ns))
        device = self.device
        device.ready.append(self)
        return self.begin_step(now_ns) if device.running is None else 0

    def begin_step(self, now_ns: int) -> int:
        """Start or continue the group's next step; return its end."""
        device = self.device
        device.ready.popleft()
        device.running = self
        decision, decided_ns = self.log[0]
        took_ns = self._start_decision(decision)
        if now_ns == decided_ns:
            took_ns *= self._cold  # the ranks were idle when it was decided
        if self._noise:
            took_ns *= max(self._rng.gauss(1.0, self._noise), NOISE_LEAST)
        self._start_ns = max(decided_ns + self._decision_ns, now_ns + self._gap_ns)
        return self._start_ns + (int(took_ns) or 1)

    def end_step(self, now_ns: int) -> Event | None:
        """End the running step or time slice; return the resulting event, None for a pause."""
        device = self.device
        device.running = None
        took_ns = now_ns - self._start_ns
        self._took_ns = took_ns if took_ns > 0 else 1
        self.busy_ns += self._took_ns
        if self._left_ns:
            device.ready.append(self)  # continues after decisions made in the meantime
            return None
        decision, _ = self.log.popleft()
        self.steps += 1
        return self._finish_decision(decision, now_ns)

    def forget_steps(self) -> None:
        """Forget everything, as a loss of the processes does."""
        self.incarnation += 1
        self._left_ns = 0.0
        self.log.clear()
        device = self.device
        if device.running is self:
            device.running = None
        device.ready = deque(group for group in device.ready if group is not self)

    def _start_decision(self, decision: Decision) -> float:
        raise NotImplementedError

    def _finish_decision(self, decision: Decision, now_ns: int) -> Event:
        raise NotImplementedError


class TimedEncodeGroup(SimulatedGroup):
    """An encode group."""

    def __init__(self, name: str, cost: CostModel, device: SharedDevice, rng: Random) -> None:
        super().__init__(name, cost, device, rng)
        self.items = 0
        self.tokens = 0

    def _start_decision(self, decision: Decision) -> float:
        assert isinstance(decision, EncodeDecision)
        tokens = [task.tokens for task in decision.tasks if not task.encoded]
        took_ns = self._left_ns or self._cost.encode_ns(tokens)
        time_slice_ns = min(took_ns, decision.time_slice_ns or took_ns)
        self._left_ns = took_ns - time_slice_ns
        return time_slice_ns

    def _finish_decision(self, decision: Decision, now_ns: int) -> Event:
        assert isinstance(decision, EncodeDecision)
        self.items += len(decision.tasks)
        self.tokens += sum(task.tokens for task in decision.tasks)
        return Encoded(decision.step, self.name)


class _Sequence:
    """A request in a slot; `first_step` is -1 until it decodes."""

    __slots__ = ("first_step", "length", "live", "number", "slot")

    def __init__(self, join: Join, live: LiveRequest) -> None:
        self.number = join.number
        self.slot = join.slot
        self.length = join.length
        self.live = live
        self.first_step = -1


class TimedGenerateGroup(SimulatedGroup):
    """A generate group.

    Attributes:
        live_requests: The requests, by number.
        itl: Collects inter-token latencies.
        decoded: Number of decoded tokens without first tokens; likewise `prefilled`.
    """

    def __init__(
        self,
        name: str,
        cost: CostModel,
        device: SharedDevice,
        rng: Random,
        *,
        slots: int,
        live_requests: Mapping[int, LiveRequest],
        itl: Sketch,
        block_bytes: int = 0,
        exact_tokens: bool = False,
    ) -> None:
        """Create an empty group.

        With `exact_tokens`, the token batch of each step shows which slots yielded a token;
        otherwise all steps share one batch, since the scheduler reads only slots that yielded.
        """
        super().__init__(name, cost, device, rng)
        self.decoded = 0
        self.prefilled = 0
        self._slots_max = slots
        self._live_requests = live_requests
        self._itl = itl
        self._exact_tokens = exact_tokens
        self._block_bytes = block_bytes
        self._tokens = array("i", [OUTPUT_TOKEN]) * slots
        costs = cost.generate
        self._costs = costs.step_ns, costs.decode_ns, costs.context_ns
        self._forget()

    def _forget(self) -> None:
        self._slots: dict[int, _Sequence] = {}
        self._joining: dict[int, LiveRequest] = {}
        self._ends: dict[int, list[_Sequence]] = {}
        self._decoding = 0
        self._offset = 0
        self._yielding = 0
        self._started: list[_Sequence] = []
        self._stepped_ns = 0
        self._swapped = NOTHING_SWAPPED

    def forget_steps(self) -> None:
        """Forget everything except the times of tokens already yielded."""
        for sequence in self._slots.values():
            if sequence.first_step >= 0:
                sequence.live.last_token_ns = self._stepped_ns
        super().forget_steps()
        self._forget()

    def decide(self, decision: Decision, now_ns: int) -> int:
        """Take a decision; see `SimulatedGroup.decide`."""
        assert isinstance(decision, GenerateDecision)
        for join in decision.joined:  # its client may leave before the step starts
            self._joining[join.number] = self._live_requests[join.number]
        return super().decide(decision, now_ns)

    def _start_decision(self, decision: Decision) -> float:
        assert isinstance(decision, GenerateDecision)
        step = decision.step
        prefill_ns = swap_ns = 0.0
        if decision.swaps is not None:
            swap_ns = self._cost.swap_ns(self._block_bytes * decision.swaps.blocks)
            self._swapped = int(swap_ns), decision.swaps.blocks
        if decision.left:
            for leave in decision.left:
                self._release_slot(self._slots.pop(leave.slot))
        if decision.joined:
            for join in decision.joined:
                self._slots[join.slot] = _Sequence(join, self._joining.pop(join.number))
        yielding = self._yielding = self._decoding
        step_ns, decode_ns, context_ns = self._costs
        context = self._offset + yielding * step
        if decision.chunks:
            prefill_ns = self._prefill(decision)
        elif not yielding:
            return EMPTY_STEP_NS + swap_ns  # all requests finished in the previous step
        return step_ns + decode_ns * yielding + context_ns * context + prefill_ns + swap_ns

    def _prefill(self, decision: GenerateDecision) -> float:
        """Apply the chunks of a step; return their time."""
        tokens, pairs, step = 0, 0.0, decision.step
        for chunk in decision.chunks:
            count = chunk.stop - chunk.start
            tokens += count
            pairs += pairs_of(chunk.start, count)
            sequence = self._slots[chunk.slot]
            if chunk.stop == sequence.length:
                # It yields a token in this step already, and decodes from the next one on.
                sequence.first_step = step
                self._started.append(sequence)
                self._decoding += 1
                self._offset += sequence.length - step
                last = step + sequence.live.total - sequence.length - 1
                self._ends.setdefault(last, []).append(sequence)
        self.prefilled += tokens
        cost = self._cost.generate
        return cost.prefill_ns * tokens + cost.pair_ns * pairs

    def _release_slot(self, sequence: _Sequence) -> None:
        """Release the slot of a sequence that is finished, preempted or aborted."""
        if sequence.first_step >= 0:
            sequence.live.last_token_ns = self._stepped_ns
            self._stop(sequence)

    def _stop(self, sequence: _Sequence) -> None:
        self._decoding -= 1
        self._offset -= sequence.length - sequence.first_step
        sequence.first_step = -1

    def _finish_decision(self, decision: Decision, now_ns: int) -> Event:
        step, yielding = decision.step, self._yielding
        if yielding:
            self.decoded += yielding
            self._itl.add(now_ns - self._stepped_ns, yielding)
        tokens = self._yielded() if self._exact_tokens else self._tokens
        self._stepped_ns = now_ns
        if self._started:
            for sequence in self._started:
                if sequence.live.last_token_ns:  # from an earlier incarnation
                    self._itl.add(now_ns - sequence.live.last_token_ns)
            self._started.clear()
        ending = self._ends.pop(step, None)
        if ending is None:
            return self._stepped(step, tokens, _NONE_FINISHED)
        finished = []
        if len(ending) > 1:
            # Same order as in ranks: decodes by slot, then chunks in their order.
            ending.sort(key=lambda one: one.slot if one.first_step < step else self._slots_max)
        for sequence in ending:
            if sequence.first_step >= 0:  # otherwise it was removed early
                self._stop(sequence)
                finished.append(Finished(sequence.slot, sequence.number, FinishReason.LENGTH))
        return self._stepped(step, tokens, finished)

    def _stepped(self, step: int, tokens: array[int], finished: list[Finished]) -> Stepped:
        if self._swapped is NOTHING_SWAPPED:
            return Stepped(step, tokens, finished, self._took_ns, self.name)
        swap_ns, blocks = self._swapped
        self._swapped = NOTHING_SWAPPED
        swap_ns = min(swap_ns, self._took_ns)
        return Stepped(step, tokens, finished, self._took_ns, self.name, [], swap_ns, blocks)

    def _yielded(self) -> array[int]:
        tokens = array("i", [-1]) * self._slots_max
        for slot, sequence in self._slots.items():
            if sequence.first_step >= 0:
                tokens[slot] = OUTPUT_TOKEN
        return tokens


_NONE_FINISHED: list[Finished] = []
"""Shared by all steps in which no request finished; never changed."""


class Contention:
    """Work in progress, and the end of each piece under the current load of the cores.

    When work begins or ends, the speed of all other work changes, and so do their ends: these are
    announced again.
    """

    def __init__(
        self, slowdowns: Sequence[float], announce: Callable[[SharedWork, int], None]
    ) -> None:
        """Use the slowdowns of `HostCost.contention`; `announce` is called with the end of each piece of work."""
        self._slowdowns = slowdowns
        self._announce = announce
        self._left_ns: dict[SharedWork, float] = {}
        self._processes: Counter[object] = Counter()
        self._since_ns = 0
        self._slowdown = 1.0

    def enter(self, work: SharedWork, need_ns: int, now_ns: int) -> None:
        """Begin work that takes `need_ns` when alone."""
        self._subtract_progress(now_ns)
        self._left_ns[work] = need_ns
        self._processes[work.process] += 1
        self._change(now_ns, newcomer=work)

    def leave(self, work: SharedWork, now_ns: int) -> None:
        """End or withdraw work; no-op if it has already ended."""
        if work in self._left_ns:
            self._subtract_progress(now_ns)
            del self._left_ns[work]
            self._processes[work.process] -= 1
            if not self._processes[work.process]:
                del self._processes[work.process]
            self._change(now_ns)

    def _subtract_progress(self, now_ns: int) -> None:
        """Subtract the progress since the last change."""
        done_ns = (now_ns - self._since_ns) / self._slowdown
        self._since_ns = now_ns
        for work in self._left_ns:
            self._left_ns[work] -= done_ns

    def _change(self, now_ns: int, newcomer: SharedWork | None = None) -> None:
        slowdown = self._slowdown_of(len(self._processes))
        late = list(self._left_ns) if slowdown != self._slowdown else [newcomer]
        self._slowdown = slowdown
        for work in late:
            if work is not None:
                work.incarnation += 1
                left_ns = max(self._left_ns[work], 0.0)
                self._announce(work, now_ns + round(left_ns * slowdown))

    def _slowdown_of(self, count: int) -> float:
        known = len(self._slowdowns)
        if count <= known:
            return self._slowdowns[max(count - 1, 0)]
        # beyond the measured range, processes share the cores equally
        return self._slowdowns[-1] * count / known


class GroupOutage(msgspec.Struct, frozen=True, kw_only=True):
    """A group is lost, with the groups that share its processes: for a while, or for good without `duration_ns`."""

    group: str
    at_ns: int
    duration_ns: int | None = None


def outage_events(
    outages: Iterable[GroupOutage], groups: Sequence[SimulatedGroup]
) -> Iterator[tuple[int, GroupLost | GroupReady | GroupRetired]]:
    """Yield the events of outages with their times; a group that is down is not lost again.

    Raises:
        ConfigError: When a group is unknown.
    """
    devices = {group.name: group.device for group in groups}
    spans: defaultdict[SharedDevice, list[Span]] = defaultdict(list)
    for one in outages:
        if one.group not in devices:
            raise ConfigError(f"{one.group}: no such group. Known: {', '.join(devices)}")
        end_ns = math.inf if one.duration_ns is None else one.at_ns + one.duration_ns
        spans[devices[one.group]].append((one.at_ns, end_ns))
    for device, lost in spans.items():
        names = [name for name, its_device in devices.items() if its_device is device]
        for start_ns, end_ns in united(lost):
            for name in names:
                yield start_ns, GroupLost(name, Simulated((name,)))
            for name in names:
                if end_ns == math.inf:
                    yield start_ns, GroupRetired(name, LostTooOften((name,)))
                else:
                    yield int(end_ns), GroupReady(name)
