"""A scheduler with the ranks of the simulated engine, of which the caller chooses what completes next.

There is no shell, no network and no time in between, so a random schedule reaches orders that
simulated engines do not. The ranks check everything they read; see `vsched.sim.ranks.stepped`.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import cast

import msgspec

from vsched.errors import PolicyError
from vsched.failures import EncodeErrorKind, LostTooOften, Simulated
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.commands import (
    Accept,
    AdmitArrival,
    Command,
    Decide,
    Drained,
    EmitTokens,
    Finish,
    Notice,
    Refuse,
    RejectArrival,
    RestartGroup,
    SetTimer,
)
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.kernel.events import (
    Aborted,
    Arrived,
    Encoded,
    EncodeFailed,
    Event,
    FurtherChoice,
    GroupLost,
    GroupReady,
    GroupRetired,
    Submitted,
    TimerFired,
    Withdrawn,
)
from vsched.policy import ImagePolicy
from vsched.policy_host import SeatPolicies
from vsched.sim.ranks.stepped import SteppedArena, SteppedGenerator, correct_outputs
from vsched.testing.defaults import default_policies
from vsched.types import FinishReason, Request, group_names, stage_of

TICK_NS = 1000
HOLD_MAX_NS = 300 * 1_000_000_000
"""Policies that hold everything for five minutes, with no other activity, count as stuck."""


class ModelCluster:
    """A scheduler with groups of ranks; the caller chooses what completes next.

    The kernel's `check_invariants` runs after every event, and everything that a rank reads is
    checked.
    """

    def __init__(self, limits: SchedulerLimits, policies: SeatPolicies | None = None) -> None:
        policies = policies or default_policies()
        self.limits = limits
        self.kernel = Scheduler(limits, policies)
        self.now_ns = 0
        self.timers: list[int] = []
        self.arena = SteppedArena(limits)
        self.requests: dict[str, Request] = {}
        self.names: dict[int, str] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Finish] = {}
        self.refused: dict[str, Refuse] = {}
        self.at_gate: dict[int, Submitted] = {}
        self.rejected: list[RejectArrival] = []
        self.encoded: list[list[bytes]] = []
        self.decisions: list[GenerateDecision] = []
        self.restarts: list[str] = []
        self.notices: list[str] = []
        self.down: set[str] = set()
        self.retired: set[str] = set()
        self.drained: list[str] = []
        self.faults = 0
        self._arrivals = 0
        self._entering: deque[Submitted] = deque()
        self.encode_logs: dict[str, deque[EncodeDecision]] = {
            name: deque() for name in group_names("encode", limits.encoders)
        }
        self.generators = {
            name: SteppedGenerator(
                name,
                limits,
                self.arena,
                lambda number: self.requests[self.names[number]],
                by_set=cast("ImagePolicy", policies.by_table["encode.encoding"]).scope != "item",
            )
            for name in group_names("generate", limits.generators)
        }
        self.groups = [*self.encode_logs, *self.generators]
        for group in self.groups:
            self.send(GroupReady(group))

    # --- events in, commands out ---

    def send(self, event: Event) -> list[Command]:
        """Pass an event to the kernel, execute the commands, check invariants, and fire due timers."""
        self.now_ns += TICK_NS
        commands = self._handle(event)
        self._ring()
        while self._entering:
            self.hand_in(self._entering.popleft())
        return commands

    def submit(self, request: Request, *, choices: int = 1) -> list[Command]:
        """Submit a request; further choices have its name with suffix `#1`, `#2`, and so on."""
        return self.hand_in(_submission(request, choices))

    def hand_in(self, event: Submitted) -> list[Command]:
        """Submit the request in an event."""
        request, further = event.request, event.further
        name = request.request_id
        for each in (name, *(one.request_id for one in further)):
            self.requests[each] = msgspec.structs.replace(request, request_id=each)
        commands = self.send(event)
        if name in self.refused:
            for one in further:
                del self.requests[one.request_id]
        return commands

    def arrive(self, request: Request, *, choices: int = 1) -> int:
        """Announce a request to the front-door policy, and submit it once it is admitted; return its arrival number."""
        self._arrivals += 1
        self.at_gate[self._arrivals] = _submission(request, choices, arrival_id=self._arrivals)
        self.send(
            Arrived(
                self._arrivals,
                request.tenant,
                request.priority,
                request.ttft_target_ms,
                images=len(request.items),
                choices=choices,
                outputs_max=request.sampling.max_tokens,
            )
        )
        return self._arrivals

    def withdraw(self, arrival_id: int) -> None:
        """Withdraw a request at the front door or in preparation, as a leaving client does."""
        self.at_gate.pop(arrival_id, None)
        self.send(Withdrawn(arrival_id))

    def abort(self, name: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort a request."""
        self.send(Aborted(name, reason))

    def wait(self, duration_ns: int) -> None:
        """Advance time, and fire timers on the way."""
        until_ns = self.now_ns + duration_ns
        while self.timers and self.timers[0] <= until_ns:
            self.now_ns = max(self.now_ns, self.timers[0])
            self._ring()
        self.now_ns = until_ns
        while self._entering:
            self.hand_in(self._entering.popleft())

    def _ring(self) -> None:
        while self.timers and self.timers[0] <= self.now_ns:
            heappop(self.timers)
            self._handle(TimerFired())

    def _handle(self, event: Event) -> list[Command]:
        commands = self.kernel.handle(event, self.now_ns)
        for command in commands:
            self.carry_out(command)
        self.kernel.check_invariants()
        return commands

    def carry_out(self, command: Command) -> None:
        """Execute a command."""
        match command:
            case Decide(group, decision):
                gone = group in self.down or group in self.retired
                assert not gone, "a decision for a group that is down"
                if isinstance(decision, EncodeDecision):
                    self.encode_logs[group].append(decision)
                    self.encoded.append([task.key for task in decision.tasks])
                else:
                    self.generators[group].log.append(decision)
                    self.decisions.append(decision)
            case AdmitArrival() | RejectArrival():
                self._answer_arrival(command)
            case Accept(request_id, number):
                self.names[number] = request_id
                self.outputs[request_id] = []
            case Finish(request_id):
                assert request_id not in self.ended, "two terminal replies"
                self.ended[request_id] = command
            case Refuse(request_id):
                assert request_id not in self.ended, "a refusal after a terminal reply"
                self.refused[request_id] = command
            case SetTimer(deadline_ns):
                assert deadline_ns > self.now_ns, "a timer in the past: it would spin"
                heappush(self.timers, deadline_ns)
            case RestartGroup(group):
                self.restarts.append(group)
            case Notice(message):
                self.notices.append(message)
            case Drained(group):
                self.drained.append(group)
            case EmitTokens():
                pass  # the outputs are recorded when they are sampled

    def _answer_arrival(self, command: AdmitArrival | RejectArrival) -> None:
        event = self.at_gate.pop(command.arrival_id)
        if isinstance(command, AdmitArrival):
            self._entering.append(event)
        else:
            self.rejected.append(command)

    # --- groups ---

    @property
    def encode_log(self) -> deque[EncodeDecision]:
        """Pending steps of the first busy encode group."""
        return next((log for log in self.encode_logs.values() if log), deque())

    @property
    def generate_log(self) -> deque[GenerateDecision]:
        """Pending steps of the first busy generate group."""
        return next((one.log for one in self.generators.values() if one.log), deque())

    def busy(self, stage: str) -> list[str]:
        """Return the groups of a stage with pending steps."""
        if stage == "encode":
            return [name for name, log in self.encode_logs.items() if log]
        return [name for name, one in self.generators.items() if one.log]

    def run_encode(self, group: str = "", *, fail: EncodeErrorKind | None = None) -> None:
        """Execute the pending step of an encode group, by default the first busy one, or make it fail."""
        group = group or self.busy("encode")[0]
        decision = self.encode_logs[group].popleft()
        if fail:
            self.faults += 1
            self.send(EncodeFailed(decision.step, fail, group))
            return
        for task in decision.tasks:
            assert len(task.pages) == self.limits.pages_for(task.tokens)
            self.arena.encode(task)
        self.send(Encoded(decision.step, group))

    def run_generate(self, group: str = "") -> None:
        """Execute the oldest pending step of a generate group, by default the first busy one."""
        result, sampled = self.generators[group or self.busy("generate")[0]].step()
        for number, token in sampled:
            name = self.names[number]
            if name not in self.ended:
                self.outputs[name].append(token)
        self.send(result)

    # --- faults ---

    def lose(self, group: str, *, planned: bool = False) -> None:
        """Lose a group with everything in flight."""
        self.faults += 1
        self.down.add(group)
        if stage_of(group) == "encode":
            self.encode_logs[group].clear()
        else:
            self.generators[group].lose()
        self.send(GroupLost(group, Simulated((group,)), planned))

    def restore_group(self, group: str) -> None:
        """Bring a lost group back."""
        self.down.discard(group)
        self.send(GroupReady(group))

    def others(self, group: str) -> list[str]:
        """Return the other groups of the same stage that are not retired."""
        stage = stage_of(group)
        return [
            one
            for one in self.groups
            if one != group and stage_of(one) == stage and one not in self.retired
        ]

    def retire(self, group: str) -> None:
        """Retire a lost group."""
        self.down.discard(group)
        self.retired.add(group)
        self.send(GroupRetired(group, LostTooOften((group,))))

    # --- settling ---

    def drain(self, *, steps_max: int = 100_000) -> None:
        """Execute all pending steps and timers until nothing is left to do."""
        moved_ns = self.now_ns
        for _ in range(steps_max):
            if self.busy("encode") or self.busy("generate"):
                self.run_encode() if self.busy("encode") else self.run_generate()
                moved_ns = self.now_ns
            elif self.timers:
                self.wait(max(self.timers[0] - self.now_ns, 0))
                assert self.now_ns - moved_ns < HOLD_MAX_NS, f"held for ever: {self.unserved()}"
            else:
                return
        raise AssertionError(f"no end after {steps_max} steps: {self.unserved()}")

    def unserved(self) -> list[str]:
        """Explain each request without a terminal reply."""
        missing = self.requests.keys() - self.ended.keys() - self.refused.keys()
        return [f"{name}: {self.kernel.explain(name)}" for name in sorted(missing)]

    def check_policies(self) -> None:
        """Raise the first failure of a policy, with the traceback of each failure as a note.

        Raises:
            PolicyError: When a call raised or returned an invalid answer.
        """
        faults = [notice for notice in self.notices if notice.startswith("policy ")]
        if faults:
            error = PolicyError(faults[0])
            for trace in self.kernel.policy_failures.values():
                error.add_note("".join(trace.format()).rstrip())
            raise error

    def check_settled(self) -> None:
        """Assert that every request was served correctly or refused, and that nothing is held."""
        assert not self.at_gate, f"neither admitted nor rejected: {list(self.at_gate)}"
        assert not self.unserved(), f"no terminal reply: {self.unserved()}"
        for name, request in self.requests.items():
            finish = self.ended.get(name)
            if finish is None:
                continue
            expected = correct_outputs(request)
            if finish.reason is not FinishReason.LENGTH:
                expected = expected[: len(self.outputs[name])]
            assert self.outputs[name] == expected, f"{name}: wrong outputs"
            if finish.reason is FinishReason.ERROR:
                explained = self.faults or finish.code in ("length_mismatch", "expired")
                assert explained, f"{name} failed without a fault: {finish.message}"
        kernel = self.kernel
        for stage in kernel.generators:
            assert stage.statistics()["blocks_held"] == 0, "leaked KV blocks"
            assert stage.statistics()["swap_blocks_held"] == 0, "leaked host memory"
            assert stage.slots_held == 0, "a leaked slot"
            assert stage.load_tokens == 0, "load is counted for no request"
        assert not kernel.embeddings.queue, "an image waits for no request"
        for entry in kernel.embeddings:
            assert not entry.claims, "an embedding is claimed by no request"
            assert not entry.pins, "an embedding is pinned by no step"


def _submission(request: Request, choices: int, *, arrival_id: int = 0) -> Submitted:
    name = request.request_id
    further = tuple(FurtherChoice(f"{name}#{one}", one) for one in range(1, choices))
    return Submitted(request, further=further, arrival_id=arrival_id)
