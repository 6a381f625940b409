"""Model ranks: they follow decisions over a symbolic memory and check everything that they read.

Instead of numbers, a KV position holds the fingerprint of the whole prefix that it was computed from, and an arena page
holds the key of the item that was encoded into it. So a block that was shared, reused or evicted wrongly, and a page
that was overwritten too early, fail at once at the step that would have read them.
"""

from __future__ import annotations

from array import array
from collections import deque
from heapq import heappop, heappush

from vsched.kernel import KernelPolicies, Scheduler, Sizes
from vsched.kernel.commands import (
    Accept,
    Command,
    Decide,
    EmitTokens,
    Finish,
    Notice,
    Refuse,
    RestartGroup,
    SetTimer,
)
from vsched.kernel.decisions import ChunkPlan, EncodeDecision, GenerateDecision, Join
from vsched.kernel.events import (
    Aborted,
    Encoded,
    EncodeFailed,
    Event,
    Finished,
    GroupLost,
    GroupReady,
    Stepped,
    Submitted,
    Timer,
)
from vsched.kernel.request import keyed_by_set
from vsched.testing.defaults import default_policies
from vsched.testing.sequence import ModelSequence, output_token, prompt_seed
from vsched.types import FinishReason, Request

TICK_NS = 1000
HOLD_MAX_NS = 300 * 1_000_000_000
"""Policies that have held everything for five minutes, with nothing else going on, are taken to hold for ever."""


class ModelCluster:
    """A scheduler with two model groups; the caller chooses what completes when.

    Every event is followed by the kernel's own `check_invariants`, and everything that a rank reads is checked.
    """

    def __init__(self, sizes: Sizes, policies: KernelPolicies | None = None) -> None:
        policies = policies or default_policies()
        self.sizes = sizes
        self.kernel = Scheduler(sizes, policies)
        self._scope = policies.encoding.scope
        self.now_ns = 0
        self.timers: list[int] = []
        self.encode_log: deque[EncodeDecision] = deque()
        self.generate_log: deque[GenerateDecision] = deque()
        self.pages: dict[int, bytes] = {}
        self.requests: dict[str, Request] = {}
        self.names: dict[int, str] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Finish] = {}
        self.refused: dict[str, Refuse] = {}
        self.encoded: list[list[bytes]] = []
        self.decisions: list[GenerateDecision] = []
        self.restarts: list[str] = []
        self.notices: list[str] = []
        self.down: set[str] = set()
        self.faults = 0
        self._empty_ranks()
        self.send(GroupReady("encode"))
        self.send(GroupReady("generate"))

    def _empty_ranks(self) -> None:
        """Forget all that the generate ranks hold, as a restart does."""
        size = self.sizes.block_size
        self.kv: list[list[int]] = [[0] * size for _ in range(self.sizes.blocks)]
        self.sequences: dict[int, ModelSequence] = {}
        self.slots: dict[int, int] = {}

    # --- events in, commands out ---

    def send(self, event: Event) -> list[Command]:
        """Hand an event to the kernel, carry its commands out, check its invariants; then ring what is due."""
        self.now_ns += TICK_NS
        commands = self._handle(event)
        self._ring()
        return commands

    def submit(self, request: Request) -> list[Command]:
        """Submit a request."""
        self.requests[request.request_id] = request
        return self.send(Submitted(request))

    def abort(self, name: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort a request."""
        self.send(Aborted(name, reason))

    def wait(self, duration_ns: int) -> None:
        """Let time pass; timers ring on the way."""
        until_ns = self.now_ns + duration_ns
        while self.timers and self.timers[0] <= until_ns:
            self.now_ns = max(self.now_ns, self.timers[0])
            self._ring()
        self.now_ns = until_ns

    def _ring(self) -> None:
        while self.timers and self.timers[0] <= self.now_ns:
            heappop(self.timers)
            self._handle(Timer())

    def _handle(self, event: Event) -> list[Command]:
        commands = self.kernel.handle(event, self.now_ns)
        for command in commands:
            self.carry_out(command)
        self.kernel.check_invariants()
        return commands

    def carry_out(self, command: Command) -> None:
        """Do what one command says."""
        match command:
            case Decide(group, decision):
                assert group not in self.down, "a decision for a group that is down"
                if isinstance(decision, EncodeDecision):
                    self.encode_log.append(decision)
                    self.encoded.append([task.key for task in decision.tasks])
                else:
                    self.generate_log.append(decision)
                    self.decisions.append(decision)
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
            case EmitTokens():
                pass  # the outputs are taken down as they are sampled

    # --- the groups ---

    def run_encode(self, *, fail: str = "") -> None:
        """Carry out the encode step that is out, or let it fail."""
        decision = self.encode_log.popleft()
        if fail:
            self.faults += 1
            self.send(EncodeFailed(decision.step, fail))
            return
        for task in decision.tasks:
            assert len(task.pages) == self.sizes.pages_for(task.tokens)
            for page in task.pages:
                self.pages[page] = task.key
        self.send(Encoded(decision.step))

    def run_generate(self) -> None:
        """Carry out the oldest generate step that is out."""
        decision = self.generate_log.popleft()
        self._apply(decision)
        tokens = array("i", [-1] * self.sizes.slots)
        finished: list[Finished] = []
        for slot in [slot for slot in sorted(self.slots) if self._at(slot).decoding]:
            sequence = self._at(slot)
            self._compute(sequence, len(sequence.tokens) - 1, len(sequence.tokens))
            self._sample(slot, sequence, tokens, finished)
        for chunk in decision.chunks:
            sequence = self._at(chunk.slot)
            assert not sequence.decoding, "a chunk of a sequence that decodes"
            assert chunk.start == sequence.computed, "a chunk does not begin where the last ended"
            self._read_items(sequence, chunk)
            self._compute(sequence, chunk.start, chunk.stop)
            if chunk.stop == len(sequence.tokens):
                sequence.decoding = True
                self._sample(chunk.slot, sequence, tokens, finished)
        # A time that depends on the step, as real ones do, and is sometimes not known.
        prefilled = sum((chunk.stop - chunk.start) * (1 + chunk.stop) for chunk in decision.chunks)
        self.send(
            Stepped(decision.step, tokens, finished, busy_ns=decision.step % 7 * (1 + prefilled))
        )

    def _at(self, slot: int) -> ModelSequence:
        return self.sequences[self.slots[slot]]

    def _apply(self, decision: GenerateDecision) -> None:
        for leave in decision.left:
            assert self.slots.pop(leave.slot) == leave.number, "another sequence has this slot"
            self.sequences[leave.number].leave()
            if not leave.keep:
                del self.sequences[leave.number]
        for number in decision.forgotten:
            del self.sequences[number]
        for join in decision.joined:
            self._join(join)
        for slot, block in zip(decision.grown[::2], decision.grown[1::2], strict=True):
            sequence = self._at(slot)
            if sequence.decoding:
                assert len(sequence.tokens) - 1 == len(sequence.blocks) * self.sizes.block_size
            sequence.blocks.append(block)

    def _join(self, join: Join) -> None:
        assert join.slot not in self.slots, "a slot was given twice"
        if join.data is not None:
            data = join.data
            known = array("i")
            known.frombytes(data.tokens)
            request = self.requests[self.names[join.number]]
            self.sequences[join.number] = ModelSequence(
                list(known),
                data.prompt_length,
                data.sampling.max_tokens,
                request.items,
                request.cache_salt,
            )
        sequence = self.sequences[join.number]
        assert join.length == len(sequence.tokens), "rank and kernel count tokens differently"
        sequence.blocks = list(join.blocks)
        sequence.computed = join.computed
        self.slots[join.slot] = join.number

    def _read_items(self, sequence: ModelSequence, chunk: ChunkPlan) -> None:
        items = sequence.items if self._scope == "item" else keyed_by_set(sequence.items)
        due = [item for item in items if item.offset < chunk.stop and item.end > chunk.start]
        assert [item.offset for item in chunk.items] == [item.offset for item in due]
        for planned, item in zip(chunk.items, due, strict=True):
            for page in planned.pages:
                assert self.pages[page] == item.key, "a chunk reads another item's embedding"

    def _compute(self, sequence: ModelSequence, start: int, stop: int) -> None:
        """Write KV for [start, stop), and check that the KV of the whole prefix is right."""
        size = self.sizes.block_size
        expected = sequence.fingerprints()
        for number, first in enumerate(range(0, stop, size)):
            last = min(first + size, stop)
            block = self.kv[sequence.blocks[number]]
            if last > start:
                begin = max(first, start)
                block[begin - first : last - first] = expected[begin:last]
            assert block[: last - first] == expected[first:last], (
                f"wrong KV in positions {first} to {last - 1}"
            )
        sequence.computed = stop

    def _sample(
        self, slot: int, sequence: ModelSequence, tokens: array[int], finished: list[Finished]
    ) -> None:
        number = self.slots[slot]
        token = output_token(sequence.seed, len(sequence.tokens))
        sequence.tokens.append(token)
        tokens[slot] = token
        name = self.names[number]
        if name not in self.ended:
            self.outputs[name].append(token)
        if len(sequence.tokens) - sequence.prompt_length >= sequence.max_tokens:
            sequence.decoding = False
            finished.append(Finished(slot, number, FinishReason.LENGTH))

    # --- faults ---

    def lose(self, group: str) -> None:
        """Lose a group with everything in flight."""
        self.faults += 1
        self.down.add(group)
        if group == "encode":
            self.encode_log.clear()
        else:
            self.generate_log.clear()
            self._empty_ranks()
        self.send(GroupLost(group, "test"))

    def restore(self, group: str) -> None:
        """Bring a lost group back."""
        self.down.discard(group)
        self.send(GroupReady(group))

    # --- the end ---

    def drain(self, *, steps_max: int = 100_000) -> None:
        """Run everything that is out, and wait for every timer, until nothing is left to do."""
        moved_ns = self.now_ns
        for _ in range(steps_max):
            if self.encode_log or self.generate_log:
                self.run_encode() if self.encode_log else self.run_generate()
                moved_ns = self.now_ns
            elif self.timers:
                self.wait(max(self.timers[0] - self.now_ns, 0))
                assert self.now_ns - moved_ns < HOLD_MAX_NS, f"held for ever: {self.unserved()}"
            else:
                return
        raise AssertionError(f"no end after {steps_max} steps: {self.unserved()}")

    def unserved(self) -> list[str]:
        """Return where the requests are that have no terminal reply."""
        missing = self.requests.keys() - self.ended.keys() - self.refused.keys()
        return [f"{name}: {self.kernel.explain(name)}" for name in sorted(missing)]

    def expected_outputs(self, request: Request) -> list[int]:
        """Return the outputs that a request must have, however it was scheduled."""
        prompt = request.prompt_token_ids
        seed, length = prompt_seed(prompt), len(prompt)
        return [output_token(seed, length + index) for index in range(request.sampling.max_tokens)]

    def check_settled(self) -> None:
        """Assert that everything was served or refused with the right outputs, and that nothing is held."""
        assert not self.unserved(), f"no terminal reply: {self.unserved()}"
        for name, request in self.requests.items():
            finish = self.ended.get(name)
            if finish is None:
                continue
            expected = self.expected_outputs(request)
            if finish.reason is not FinishReason.LENGTH:
                expected = expected[: len(self.outputs[name])]
            assert self.outputs[name] == expected, f"{name}: wrong outputs"
            if finish.reason is FinishReason.ERROR:
                explained = self.faults or finish.code == "length_mismatch"
                assert explained, f"{name} failed without a fault: {finish.message}"
        kernel = self.kernel
        assert kernel.generate.pool.held == 0, "KV blocks are held by nobody"
        assert len(kernel.generate.running) == 0, "a slot is held by nobody"
        assert kernel.encode.waiting == 0, "an item waits for nobody"
        for entry in kernel.encode:
            assert not entry.users, "an embedding is claimed by nobody"
            assert not entry.readers, "an embedding is pinned by nobody"
