"""Groups of ranks that model only the duration of steps, without memory, tokens or processes.

A sequence yields a token in every step from the one with its last chunk until it ends, and a
decision contains only changes. So the last step of a sequence is known when it starts to decode,
and the sequence is not visited before then: a steady step costs the same for any number of
sequences. Context lengths all grow by one per step, so their sum is a constant plus the number of
sequences times the step number. Accepted draft tokens move the end of a sequence earlier; only
sequences with a draft grant are visited.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random

from vsched.failures import EncodeErrorKind
from vsched.kernel.decisions import Decision, DraftGrant, EncodeDecision, GenerateDecision, Join
from vsched.kernel.events import Drafted, Encoded, EncodeFailed, Event, Finished, Stepped
from vsched.policy_host.step_times import pairs_of
from vsched.sim.cost.model import CostModel
from vsched.sim.fast.links import GroupLink
from vsched.sim.fast.metrics import LiveRequest, Sketch
from vsched.sim.setup import DraftLuck
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


class SimulatedGroup:
    """One group; computes when each step ends or pauses, and the resulting event.

    Attributes:
        link: The link to its host; None on the engine's host.
        log: Pending decisions, each with the times it was decided and received; the first one is
            running if the device runs this group.
        losses: Number of losses.
        reported_ns: When the engine receives the result of the last step.
        incarnation: Counts losses and rescheduled ends; an end announced in an earlier incarnation
            is void.
        slowdown: Factor on step durations.
        held_ns: No step begins before this time.
        steps: Number of completed steps; `busy_ns` is the time in them and in the time slices of a
            paused one.
    """

    def __init__(self, name: str, cost: CostModel, device: SharedDevice, rng: Random) -> None:
        self.name = name
        self.device = device
        self.link: GroupLink | None = None
        self.log: deque[tuple[Decision, int, int]] = deque()
        self.losses = 0
        self.reported_ns = 0
        self.incarnation = 0
        self.slowdown = 1.0
        self.held_ns = 0
        self.steps = 0
        self.busy_ns = 0
        self._cost = cost
        self._decision_ns, self._gap_ns = int(cost.host.decision_ns), int(cost.host.gap_ns)
        self._noise = cost.noise
        self._cold = cost.host.cold
        self._rng = rng
        self._start_ns = self._took_ns = 0
        self._left_ns = 0.0

    @property
    def process(self) -> object:
        """The device that executes its steps."""
        return self.device

    def decide(self, decision: Decision, now_ns: int) -> int:
        """Take a decision; return the end of its step, or 0 if it cannot start yet."""
        there_ns = now_ns if self.link is None else self.link.decision_ns(decision, now_ns)
        self.log.append((decision, now_ns, there_ns))
        device = self.device
        device.ready.append(self)
        return self.begin(now_ns) if device.running is None else 0

    def begin(self, now_ns: int) -> int:
        """Start or continue the group's next step; return its end."""
        device = self.device
        device.ready.popleft()
        device.running = self
        decision, decided_ns, there_ns = self.log[0]
        took_ns = self._start(decision)
        if now_ns == decided_ns:
            took_ns *= self._cold  # the ranks were idle when it was decided
        if self._noise:
            took_ns *= max(self._rng.gauss(1.0, self._noise), NOISE_LEAST)
        self._start_ns = max(there_ns + self._decision_ns, now_ns + self._gap_ns, self.held_ns)
        return self._start_ns + (int(took_ns * self.slowdown) or 1)

    def end(self, now_ns: int) -> Event | None:
        """End the running step or time slice; return the resulting event, None for a pause."""
        device = self.device
        device.running = None
        took_ns = now_ns - self._start_ns
        self._took_ns = took_ns if took_ns > 0 else 1
        self.busy_ns += self._took_ns
        if self._left_ns:
            device.ready.append(self)  # continues after decisions made in the meantime
            return None
        decision, _, _ = self.log.popleft()
        self.reported_ns = now_ns if self.link is None else self.link.result_ns(decision, now_ns)
        self.steps += 1
        return self._finish(decision, now_ns)

    def lose(self) -> None:
        """Forget everything, as a loss of the processes does."""
        self.incarnation += 1
        self.losses += 1
        self._left_ns = 0.0
        self.log.clear()
        device = self.device
        if device.running is self:
            device.running = None
        device.ready = deque(group for group in device.ready if group is not self)

    def _start(self, decision: Decision) -> float:
        raise NotImplementedError

    def _finish(self, decision: Decision, now_ns: int) -> Event:
        raise NotImplementedError


class TimedEncodeGroup(SimulatedGroup):
    """An encode group.

    Attributes:
        faults: Errors of the next steps.
    """

    def __init__(self, name: str, cost: CostModel, device: SharedDevice, rng: Random) -> None:
        super().__init__(name, cost, device, rng)
        self.faults: deque[EncodeErrorKind] = deque()
        self.items = 0
        self.tokens = 0

    def _start(self, decision: Decision) -> float:
        assert isinstance(decision, EncodeDecision)
        tokens = [task.tokens for task in decision.tasks if not task.encoded]
        took_ns = self._left_ns or self._cost.encode_ns(tokens)
        time_slice_ns = min(took_ns, decision.time_slice_ns or took_ns)
        self._left_ns = took_ns - time_slice_ns
        return time_slice_ns

    def _finish(self, decision: Decision, now_ns: int) -> Event:
        assert isinstance(decision, EncodeDecision)
        if self.faults:
            return EncodeFailed(decision.step, self.faults.popleft(), self.name)
        self.items += len(decision.tasks)
        self.tokens += sum(task.tokens for task in decision.tasks)
        return Encoded(decision.step, self.name)


class _Sequence:
    """A request in a slot; `first_step` is -1 until it decodes.

    `last` is its last step, `gained` the number of accepted draft tokens, and `blocks` its number
    of KV blocks.
    """

    __slots__ = ("blocks", "first_step", "gained", "last", "length", "live", "number", "slot")

    def __init__(self, join: Join, live: LiveRequest) -> None:
        self.number = join.number
        self.slot = join.slot
        self.length = join.length
        self.live = live
        self.first_step = -1
        self.last = self.gained = 0
        self.blocks = len(join.blocks)


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
        drafts: DraftLuck | None = None,
        block_size: int = 16,
    ) -> None:
        """Create an empty group.

        With `exact_tokens`, the token batch of each step shows which slots yielded a token;
        otherwise all steps share one batch, since the scheduler reads only slots that yielded.
        `drafts` models speculative decoding.
        """
        super().__init__(name, cost, device, rng)
        self.decoded = 0
        self.prefilled = 0
        self._slots_max = slots
        self._live_requests = live_requests
        self._itl = itl
        self._exact_tokens = exact_tokens
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._luck = drafts or DraftLuck()
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
        self._grants: dict[int, DraftGrant] = {}
        self._drafts: list[tuple[_Sequence, int]] = []

    def lose(self) -> None:
        """Forget everything except the times of tokens already yielded."""
        for sequence in self._slots.values():
            if sequence.first_step >= 0:
                sequence.live.last_token_ns = self._stepped_ns
        super().lose()
        self._forget()

    def decide(self, decision: Decision, now_ns: int) -> int:
        """Take a decision; see `SimulatedGroup.decide`."""
        assert isinstance(decision, GenerateDecision)
        for join in decision.joined:  # its client may leave before the step starts
            self._joining[join.number] = self._live_requests[join.number]
        return super().decide(decision, now_ns)

    def _start(self, decision: Decision) -> float:
        assert isinstance(decision, GenerateDecision)
        step = decision.step
        prefill_ns = swap_ns = 0.0
        if decision.swaps is not None:
            swap_ns = self._cost.swap_ns(self._block_bytes * decision.swaps.blocks)
            self._swapped = int(swap_ns), decision.swaps.blocks
        if decision.left:
            for leave in decision.left:
                self._grants.pop(leave.slot, None)
                self._leave(self._slots.pop(leave.slot))
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
        if self._luck.acceptance:
            prefill_ns += self._draft(decision)
        return step_ns + decode_ns * yielding + context_ns * context + prefill_ns + swap_ns

    def _draft(self, decision: GenerateDecision) -> float:
        """Draft tokens for the granted slots, within their blocks and output limits; return the time."""
        for slot in decision.grown[::2]:
            self._slots[slot].blocks += 1
        self._grants |= {grant.slot: grant for grant in decision.granted}
        step, rows, deepest = decision.step, 0, 0
        for slot, grant in self._grants.items():
            sequence = self._slots[slot]
            if not 0 <= sequence.first_step < step:
                continue
            known = sequence.length + step - sequence.first_step + sequence.gained
            room = min(sequence.blocks * self._block_size - known, sequence.last - step)
            drafts = min(grant.tokens, room)
            if drafts > 0:
                self._drafts.append((sequence, drafts))
                rows += drafts
                deepest = max(deepest, drafts if grant.model else 0)
        step_ns, decode_ns, _ = self._costs
        model_ns = self._luck.model_time * (step_ns + decode_ns * len(self._drafts))
        return decode_ns * rows + deepest * model_ns

    def _verify(self) -> list[Drafted]:
        """Draw the accepted draft tokens, and move the ends of their sequences."""
        reported: list[Drafted] = []
        for sequence, drafts in self._drafts:
            right = 0
            while right < drafts and self._rng.random() < self._luck.acceptance:
                right += 1
            reported.append(Drafted(sequence.slot, drafts, [OUTPUT_TOKEN] * right))
            if right:
                self._ends[sequence.last].remove(sequence)
                sequence.last -= right
                self._ends.setdefault(sequence.last, []).append(sequence)
                sequence.gained += right
                self._offset += right
                self.decoded += right
        self._drafts = []
        return reported

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
                sequence.last = step + sequence.live.total - sequence.length - 1
                self._ends.setdefault(sequence.last, []).append(sequence)
        self.prefilled += tokens
        cost = self._cost.generate
        return cost.prefill_ns * tokens + cost.pair_ns * pairs

    def _leave(self, sequence: _Sequence) -> None:
        """Release the slot of a sequence that is finished, preempted or aborted."""
        if sequence.first_step >= 0:
            sequence.live.last_token_ns = self._stepped_ns
            self._stop(sequence)

    def _stop(self, sequence: _Sequence) -> None:
        self._decoding -= 1
        self._offset -= sequence.length + sequence.gained - sequence.first_step
        sequence.first_step = -1

    def _finish(self, decision: Decision, now_ns: int) -> Event:
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
        drafted = self._verify() if self._drafts else _NONE_DRAFTED
        ending = self._ends.pop(step, None)
        if ending is None:
            return self._stepped(step, tokens, _NONE_FINISHED, drafted)
        finished = []
        if len(ending) > 1:
            # Same order as in ranks: decodes by slot, then chunks in their order.
            ending.sort(key=lambda one: one.slot if one.first_step < step else self._slots_max)
        for sequence in ending:
            if sequence.first_step >= 0:  # otherwise it was removed early
                self._stop(sequence)
                finished.append(Finished(sequence.slot, sequence.number, FinishReason.LENGTH))
        return self._stepped(step, tokens, finished, drafted)

    def _stepped(
        self, step: int, tokens: array[int], finished: list[Finished], drafted: list[Drafted]
    ) -> Stepped:
        if self._swapped is NOTHING_SWAPPED:
            return Stepped(step, tokens, finished, self._took_ns, self.name, drafted)
        swap_ns, blocks = self._swapped
        self._swapped = NOTHING_SWAPPED
        swap_ns = min(swap_ns, self._took_ns)
        return Stepped(step, tokens, finished, self._took_ns, self.name, drafted, swap_ns, blocks)

    def _yielded(self) -> array[int]:
        tokens = array("i", [-1]) * self._slots_max
        for slot, sequence in self._slots.items():
            if sequence.first_step >= 0:
                tokens[slot] = OUTPUT_TOKEN
        return tokens


_NONE_FINISHED: list[Finished] = []
"""Shared by all steps in which no request finished; never changed."""
_NONE_DRAFTED: list[Drafted] = []
"""Shared by all steps without draft tokens; never changed."""
