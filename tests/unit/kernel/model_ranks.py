"""Model ranks: they follow decisions over a symbolic memory and check everything that they read.

Instead of numbers, a KV position holds the fingerprint of the whole prefix that it was computed from, and an arena page
holds the key of the item that was encoded into it. So a block that was shared, reused or evicted wrongly, and a page
that was overwritten too early, fail at once at the step that would have read them.
"""

from __future__ import annotations

import random
from array import array
from collections import deque

from vsched.kernel import KernelPolicies, Scheduler, Sizes
from vsched.kernel.commands import Accept, Command, Decide, Finish, Notice, Refuse, RestartGroup
from vsched.kernel.decisions import ChunkItem, EncodeDecision, GenerateDecision
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
)
from vsched.types import Extent, FinishReason, MediaItem, Request, SamplingParams
from vsched_policies.admission import Fifo, TokenBudget
from vsched_policies.encoding import ChunkAware
from vsched_policies.eviction import Lru
from vsched_policies.preemption import Youngest

PLACEHOLDER = 5


def default_policies(**changes: object) -> KernelPolicies:
    """Return the built-in policies, with changes."""
    policies = {
        "encode_admission": TokenBudget(),
        "generate_admission": Fifo(),
        "encoding": ChunkAware(),
        "embedding_eviction": Lru(),
        "prefix_eviction": Lru(),
        "preemption": Youngest(),
    }
    return KernelPolicies(**{**policies, **changes})  # type: ignore[arg-type]


def make_request(
    name: str,
    text: list[int],
    items: list[tuple[int, int, bytes]] | None = None,
    *,
    max_tokens: int = 4,
) -> Request:
    """Return a request of `text` with items (index in text, tokens, key) put in."""
    tokens: list[int] = []
    placed: list[MediaItem] = []
    position = 0
    for index, count, key in items or []:
        tokens += text[position:index]
        position = index
        placed.append(
            MediaItem(
                key=key,
                tokens=count,
                offset=len(tokens),
                grid=(1, 2, 2 * count),
                pixels=Extent(0, 16),
            )
        )
        tokens += [PLACEHOLDER] * count
    tokens += text[position:]
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        items=tuple(placed),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def output_token(name: int, position: int) -> int:
    """Return the token that the model ranks "sample": a function of prompt and position."""
    return 100 + hash((name, position)) % 5000


def fingerprint(tokens: list[int], items: list[tuple[int, int, bytes]], length: int) -> int:
    """Return what the KV at position `length - 1` depends on."""
    seen = tuple((offset, key) for offset, count, key in items if offset < length)
    return hash((tuple(tokens[:length]), seen))


class ModelSequence:
    """A sequence as the model rank keeps it."""

    def __init__(self, tokens: list[int], prompt_length: int, max_tokens: int) -> None:
        self.tokens = tokens
        self.prompt_length = prompt_length
        self.max_tokens = max_tokens
        self.items: list[tuple[int, int, bytes]] = []
        self.seed = hash(tuple(tokens[:prompt_length]))
        self.blocks: list[int] = []
        self.computed = 0
        self.decoding = False


class Cluster:
    """A scheduler with two model groups; tests choose what completes when."""

    def __init__(self, sizes: Sizes, policies: KernelPolicies | None = None) -> None:
        self.sizes = sizes
        self.kernel = Scheduler(sizes, policies or default_policies())
        self.now_ns = 0
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
        self.empty_ranks()
        self.send(GroupReady("encode"))
        self.send(GroupReady("generate"))

    def empty_ranks(self) -> None:
        """Forget all that the generate ranks hold, as a restart does."""
        self.kv: dict[tuple[int, int], int] = {}
        self.sequences: dict[int, ModelSequence] = {}
        self.slots: dict[int, int] = {}

    def send(self, event: Event) -> list[Command]:
        """Hand an event to the kernel, carry its commands out, check its invariants."""
        self.now_ns += 1000
        commands = self.kernel.handle(event, self.now_ns)
        for command in commands:
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
                    self.refused[request_id] = command
                case RestartGroup(group):
                    self.restarts.append(group)
                case Notice(message):
                    self.notices.append(message)
        self.kernel.check_invariants()
        return commands

    def submit(self, request: Request) -> list[Command]:
        """Submit a request."""
        self.requests[request.request_id] = request
        return self.send(Submitted(request))

    def abort(self, name: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort a request."""
        self.send(Aborted(name, reason))

    # --- the groups ---

    def run_encode(self, *, fail: str = "") -> None:
        """Carry out the encode step that is out."""
        decision = self.encode_log.popleft()
        if fail:
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
        size = self.sizes.block_size
        tokens = array("i", [-1] * self.sizes.slots)
        finished: list[Finished] = []
        decoding = [slot for slot in sorted(self.slots) if self._at(slot).decoding]
        for slot in decoding:
            sequence = self._at(slot)
            self._compute(sequence, len(sequence.tokens) - 1, len(sequence.tokens))
            self._sample(slot, sequence, tokens, finished)
        for chunk in decision.chunks:
            sequence = self._at(chunk.slot)
            assert not sequence.decoding
            assert chunk.start == sequence.computed
            self._read_items(sequence, chunk.start, chunk.stop, chunk.items)
            self._compute(sequence, chunk.start, chunk.stop)
            if chunk.stop == len(sequence.tokens):
                sequence.decoding = True
                self._sample(chunk.slot, sequence, tokens, finished)
        assert all(len(self._at(s).blocks) * size >= self._at(s).computed for s in self.slots)
        self.send(Stepped(decision.step, tokens, finished))

    def _at(self, slot: int) -> ModelSequence:
        return self.sequences[self.slots[slot]]

    def _apply(self, decision: GenerateDecision) -> None:
        for leave in decision.left:
            assert self.slots.pop(leave.slot) == leave.number
            sequence = self.sequences[leave.number]
            sequence.decoding, sequence.blocks, sequence.computed = False, [], 0
            if not leave.keep:
                del self.sequences[leave.number]
        for number in decision.forgotten:
            del self.sequences[number]
        for join in decision.joined:
            assert join.slot not in self.slots, "a slot was given twice"
            if join.data is not None:
                data = join.data
                known = array("i")
                known.frombytes(data.tokens)
                sequence = ModelSequence(list(known), data.prompt_length, data.sampling.max_tokens)
                request = self.requests[self.names[join.number]]
                sequence.items = [(i.offset, i.tokens, i.key) for i in request.items]
                self.sequences[join.number] = sequence
            sequence = self.sequences[join.number]
            assert join.length == len(sequence.tokens), "rank and kernel count tokens differently"
            sequence.blocks = list(join.blocks)
            sequence.computed = join.computed
            self.slots[join.slot] = join.number
        for slot, block in zip(decision.grown[::2], decision.grown[1::2], strict=True):
            sequence = self._at(slot)
            if sequence.decoding:
                assert len(sequence.tokens) - 1 == len(sequence.blocks) * self.sizes.block_size
            sequence.blocks.append(block)

    def _read_items(
        self, sequence: ModelSequence, start: int, stop: int, items: list[ChunkItem]
    ) -> None:
        due = [item for item in sequence.items if item[0] < stop and item[0] + item[1] > start]
        assert [item.offset for item in items] == [item[0] for item in due]
        for item, (_, _, key) in zip(items, due, strict=True):
            for page in item.pages:
                assert self.pages[page] == key, "a chunk reads another item's embedding"

    def _compute(self, sequence: ModelSequence, start: int, stop: int) -> None:
        """Write KV for [start, stop), checking that the KV of the whole prefix is right."""
        size = self.sizes.block_size
        for position in range(stop):
            place = (sequence.blocks[position // size], position % size)
            expected = fingerprint(sequence.tokens, sequence.items, position + 1)
            if position >= start:
                self.kv[place] = expected
            assert self.kv.get(place) == expected, f"wrong KV at position {position}"
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

    def lose(self, group: str) -> None:
        """Lose a group with everything in flight."""
        self.down.add(group)
        if group == "encode":
            self.encode_log.clear()
        else:
            self.generate_log.clear()
            self.empty_ranks()
        self.send(GroupLost(group, "test"))

    def restore(self, group: str) -> None:
        """Bring a lost group back."""
        self.down.discard(group)
        self.send(GroupReady(group))

    def drain(self, *, steps_max: int = 10_000) -> None:
        """Run everything that is out until nothing is."""
        for _ in range(steps_max):
            if self.encode_log:
                self.run_encode()
            elif self.generate_log:
                self.run_generate()
            else:
                return
        raise AssertionError("the cluster does not come to rest")

    def expected_outputs(self, request: Request) -> list[int]:
        """Return the outputs that a request must have, however it was scheduled."""
        prompt = request.prompt_token_ids
        seed = hash(tuple(prompt))
        count = request.sampling.max_tokens
        return [output_token(seed, len(prompt) + index) for index in range(count)]


def random_request(
    rng: random.Random, name: str, *, image_tokens_max: int, length_max: int
) -> Request:
    """Return a request with a random text (often a shared prefix) and some images from a small set."""
    text = [(7 * i) % 50 + 10 for i in range(rng.randint(1, length_max))]
    if rng.random() < 0.5:
        text = [rng.randint(10, 60) for _ in text]
    items = []
    for index in sorted(rng.randint(0, len(text)) for _ in range(rng.choice([0, 0, 1, 1, 2, 4]))):
        which = rng.randint(0, 5)
        tokens = 1 + (which * 7) % image_tokens_max
        items.append((index, tokens, b"image%d" % which))
    return make_request(name, text, items, max_tokens=rng.randint(1, 30))
