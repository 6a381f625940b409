"""A model of a generate group with symbolic memory instead of numbers.

Each KV position holds the fingerprint of the whole prefix it was computed from. So a block that was
wrongly shared, reused or evicted fails in the first step that reads it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from vsched.kernel import SchedulerLimits
from vsched.kernel.decisions import ChunkPlan, DraftGrant, GenerateDecision, Join, SwapCopies
from vsched.kernel.events import Drafted, Finished, Stepped
from vsched.kernel.request import keyed_by_set
from vsched.types import FinishReason, MediaItem, Request

DRAFTED = 0xD4AF7
"""KV content of a rejected draft token."""


def output_token(seed: int, position: int) -> int:
    """Return the token that model ranks "sample": a function of prompt and position, the same in every process."""
    return 100 + hash((seed, position)) % 5000


def prompt_seed(prompt: list[int]) -> int:
    """Return the seed of a prompt's outputs."""
    return hash(tuple(prompt))


class ModelSequence:
    """Token ids, and for each the fingerprint of everything its KV depends on.

    Attributes:
        atoms: Ranges of positions whose KV depends on the whole range.
        granted: Whether ranks may have drafted for it since it took its slot.
        tells_prompt: Whether prompt log-probabilities are requested, so that the whole prompt must
            be computed.
    """

    def __init__(
        self,
        tokens: list[int],
        prompt_length: int,
        max_tokens: int,
        items: tuple[MediaItem, ...],
        cache_salt: str,
        *,
        adapter: int = 0,
        atoms: Sequence[tuple[int, int]] = (),
        tells_prompt: bool = False,
    ) -> None:
        self.atoms = atoms
        self.tells_prompt = tells_prompt
        self.tokens = tokens
        self.prompt_length = prompt_length
        self.max_tokens = max_tokens
        self.items = items
        self.seed = prompt_seed(tokens[:prompt_length])
        self.blocks: list[int] = []
        self.computed = 0
        self.decoding = False
        self.granted = False
        self._fingerprints: list[int] = []
        self._seen = hash((cache_salt, adapter))

    def leave(self) -> None:
        """Release the slot and the content of all blocks."""
        self.decoding, self.blocks, self.computed = False, [], 0
        self.granted = False

    def fingerprints(self) -> list[int]:
        """Return the dependencies of each position's KV: all tokens and images up to it."""
        known = self._fingerprints
        if len(known) < len(self.tokens):
            first = len(known)
            seen = self._seen
            for position in range(first, len(self.tokens)):
                within = next(
                    (item for item in self.items if item.offset <= position < item.end), None
                )
                content = None if within is None else (within.key, position - within.offset)
                seen = hash((seen, self.tokens[position], content))
                known.append(seen)
            self._seen = seen
            for start, end in self.atoms if not first else ():  # they are within the prompt
                whole = known[end - 1]
                known[start:end] = [hash((whole, position)) for position in range(start, end)]
        return known


class ModelGenerator:
    """One generate group; checks everything it reads.

    Attributes:
        log: Pending decisions.
        luck: Number of accepted draft tokens for a slot; by default a function of the sequence.
    """

    luck: Callable[[int, int], int] | None = None

    def __init__(
        self,
        name: str,
        limits: SchedulerLimits,
        pages: Mapping[int, bytes],
        request_of: Callable[[int], Request],
        *,
        scope: str,
    ) -> None:
        """Create an empty group; `pages` is the arena's content, and `request_of` looks up requests by number."""
        self.name = name
        self._limits = limits
        self._pages = pages
        self._request_of = request_of
        self._scope = scope
        self.lose()

    def lose(self) -> None:
        """Forget everything, as a restart does."""
        size = self._limits.block_size
        self.log: deque[GenerateDecision] = deque()
        self.kv: list[list[int]] = [[0] * size for _ in range(self._limits.blocks)]
        self.sequences: dict[int, ModelSequence] = {}
        self.slots: dict[int, int] = {}
        self.states: dict[int, int] = {}
        self.snapshots: dict[int, int] = {}
        self.grants: dict[int, DraftGrant] = {}
        self.places: dict[int, list[int]] = {}

    def step(self) -> tuple[Stepped, list[tuple[int, int]]]:
        """Execute the oldest decision; return its result, and the sampled tokens as (request number, token)."""
        decision = self.log.popleft()
        self._apply(decision)
        tokens = array("i", [-1] * self._limits.slots)
        finished: list[Finished] = []
        drafted: list[Drafted] = []
        more: list[tuple[int, int]] = []
        rows = 0
        for slot in [slot for slot in sorted(self.slots) if self._at(slot).decoding]:
            sequence = self._at(slot)
            self._compute(sequence, len(sequence.tokens) - 1, len(sequence.tokens))
            self._pass_state(slot, len(sequence.tokens) - 1, len(sequence.tokens))
            rows += 1
            drafts = self._draft(slot, sequence)
            tokens[slot] = self._sample(slot, sequence, finished)
            if drafts:
                found = self._verify(slot, sequence, drafts, finished)
                more += [(self.slots[slot], token) for token in found.tokens]
                drafted.append(found)
                rows += drafts
        for chunk in decision.chunks:
            sequence = self._at(chunk.slot)
            assert not sequence.decoding, "a chunk of a sequence that decodes"
            assert chunk.start == sequence.computed, (
                "a chunk does not begin at the end of the previous one"
            )
            cut = [one for one in sequence.atoms if one[0] < chunk.stop < one[1]]
            assert not cut, f"a chunk that ends at {chunk.stop} cuts {cut}"
            self._read_items(sequence, chunk)
            self._compute(sequence, chunk.start, chunk.stop)
            at = chunk.start
            for write in chunk.writes:
                assert at < write.end <= chunk.stop, "a snapshot is taken out of order"
                self._pass_state(chunk.slot, at, write.end)
                self.snapshots[write.place] = self.states[chunk.slot]
                at = write.end
            self._pass_state(chunk.slot, at, chunk.stop)
            if chunk.stop == len(sequence.tokens):
                sequence.decoding = True
                tokens[chunk.slot] = self._sample(chunk.slot, sequence, finished)
                rows += 1
        assert rows <= self._limits.slots, "more rows to sample than slots"
        # The time depends on the step, as real times do, and is sometimes unknown.
        prefilled = sum((chunk.stop - chunk.start) * (1 + chunk.stop) for chunk in decision.chunks)
        busy_ns = decision.step % 7 * (1 + prefilled)
        sampled = [(self.slots[slot], token) for slot, token in enumerate(tokens) if token >= 0]
        blocks = 0 if decision.swaps is None else decision.swaps.blocks
        swap_ns = min(busy_ns, 3 * blocks)
        result = Stepped(
            decision.step, tokens, finished, busy_ns, self.name, drafted, swap_ns, blocks
        )
        return result, sampled + more

    def _draft(self, slot: int, sequence: ModelSequence) -> int:
        """Write the maximum number of draft tokens after the last token, as invalid KV; return their number."""
        grant = self.grants.get(slot)
        if grant is None:
            return 0
        size = self._limits.block_size
        length, reach = len(sequence.tokens), len(sequence.blocks) * size
        room = sequence.prompt_length + sequence.max_tokens - 1 - length
        drafts = min(grant.tokens, room, reach - length)
        for position in range(length, length + drafts):
            self.kv[sequence.blocks[position // size]][position % size] = DRAFTED
        return drafts

    def _verify(
        self, slot: int, sequence: ModelSequence, drafts: int, finished: list[Finished]
    ) -> Drafted:
        """Accept draft tokens as given by `luck`, but none past the end."""
        if self.luck is None:
            right = output_token(sequence.seed ^ DRAFTED, len(sequence.tokens)) % (drafts + 1)
        else:
            right = self.luck(slot, drafts)
        taken: list[int] = []
        while sequence.decoding and len(taken) < right:
            self._compute(sequence, len(sequence.tokens) - 1, len(sequence.tokens))
            taken.append(self._sample(slot, sequence, finished))
        return Drafted(slot, drafts, taken)

    def _pass_state(self, slot: int, start: int, stop: int) -> None:
        """Advance the recurrent state of a slot over [start, stop), if the model has one."""
        if self._limits.state_snapshots is None or start == stop:
            return
        expected = self._at(slot).fingerprints()
        if start:
            assert self.states[slot] == expected[start - 1], "a state of another sequence"
        self.states[slot] = expected[stop - 1]

    def _at(self, slot: int) -> ModelSequence:
        return self.sequences[self.slots[slot]]

    def _swap(self, swaps: SwapCopies) -> None:
        """Copy blocks to and from swap; swapped-in blocks are removed from swap, so that they cannot be read twice."""
        for written in (swaps.out[1::2], swaps.back[1::2]):
            assert len(set(written)) == len(written), "two copies have the same target"
        for block, place in zip(swaps.out[::2], swaps.out[1::2], strict=True):
            assert 0 <= place < self._limits.swap_blocks, "no such place"
            self.places[place] = list(self.kv[block])
        for place, block in zip(swaps.back[::2], swaps.back[1::2], strict=True):
            self.kv[block] = self.places.pop(place)

    def _apply(self, decision: GenerateDecision) -> None:
        if decision.swaps is not None:
            self._swap(decision.swaps)
        for leave in decision.left:
            assert self.slots.pop(leave.slot) == leave.number, "another sequence has this slot"
            self.sequences[leave.number].leave()
            self.grants.pop(leave.slot, None)
            if not leave.keep:
                del self.sequences[leave.number]
        for number in decision.forgotten:
            del self.sequences[number]
        for join in decision.joined:
            self._join(join)
        for grant in decision.granted:
            assert grant.slot in self.slots, "a grant for an empty slot"
            assert self._limits.drafts, "a grant for ranks that cannot draft"
            self.grants[grant.slot] = grant
            self._at(grant.slot).granted = True
        for slot, block in zip(decision.grown[::2], decision.grown[1::2], strict=True):
            sequence = self._at(slot)
            if sequence.decoding and not sequence.granted:
                assert len(sequence.tokens) - 1 == len(sequence.blocks) * self._limits.block_size
            sequence.blocks.append(block)

    def _join(self, join: Join) -> None:
        assert join.slot not in self.slots, "a slot was assigned twice"
        if join.data is not None:
            data = join.data
            known = array("i")
            known.frombytes(data.tokens)
            request = self._request_of(join.number)
            assert data.adapter == request.adapter, (
                "computed with another adapter than was asked for"
            )
            self.sequences[join.number] = ModelSequence(
                list(known),
                data.prompt_length,
                data.sampling.max_tokens,
                request.items,
                request.cache_salt,
                adapter=data.adapter,
                atoms=self._atoms(data.prompt_length, request.items),
                tells_prompt=data.sampling.prompt_logprobs is not None,
            )
        sequence = self.sequences[join.number]
        assert join.length == len(sequence.tokens), "rank and kernel count tokens differently"
        if sequence.tells_prompt and len(sequence.tokens) == sequence.prompt_length:
            assert join.computed == 0, "no log-probabilities exist for cached prompt tokens"
        sequence.blocks = list(join.blocks)
        sequence.computed = join.computed
        self.slots[join.slot] = join.number
        if self._limits.state_snapshots is not None:
            assert (join.restored is None) == (join.computed == 0), "blocks without their state"
        if join.restored is not None:
            assert 0 <= join.restored < (self._limits.state_snapshots or 0), "no such place"
            self.states[join.slot] = self.snapshots[join.restored]

    def _atoms(self, prompt_length: int, items: Sequence[MediaItem]) -> Sequence[tuple[int, int]]:
        if self._limits.prompt_atomic:
            return [(0, prompt_length)]
        return [run for item in items for run in item.runs] if self._limits.item_atomic else ()

    def _read_items(self, sequence: ModelSequence, chunk: ChunkPlan) -> None:
        items = sequence.items if self._scope == "item" else keyed_by_set(sequence.items)
        due = [item for item in items if item.offset < chunk.stop and item.end > chunk.start]
        assert [item.offset for item in chunk.items] == [item.offset for item in due]
        for planned, item in zip(chunk.items, due, strict=True):
            for page in planned.pages:
                assert self._pages[page] == item.key, "a chunk reads another item's embedding"

    def _compute(self, sequence: ModelSequence, start: int, stop: int) -> None:
        """Write KV for [start, stop), and check the KV of the whole prefix."""
        size = self._limits.block_size
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

    def _sample(self, slot: int, sequence: ModelSequence, finished: list[Finished]) -> int:
        token = output_token(sequence.seed, len(sequence.tokens))
        sequence.tokens.append(token)
        if len(sequence.tokens) - sequence.prompt_length >= sequence.max_tokens:
            sequence.decoding = False
            finished.append(Finished(slot, self.slots[slot], FinishReason.LENGTH))
        return token
