"""A group of ranks without time: each call runs one step of the production rank, on the symbolic model.

For schedules in which a caller decides which step completes next. What a rank could not know is
checked as well: the limits of a step, and that blocks are added only when they are needed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.kernel import SchedulerLimits
from vsched.kernel.decisions import ChunkPlan, EncodeTask, GenerateDecision, Join
from vsched.kernel.events import Stepped
from vsched.sim.ranks.symbolic_model import (
    answer,
    embedding_rows,
    extend,
    next_token,
    root_of,
)
from vsched.sim.ranks.symbolic_workers import (
    Known,
    Process,
    SymbolicGenerator,
    stand_in_info,
    write_rows,
)
from vsched.sim.world import QUICK, Delays
from vsched.types import MediaItem, Request
from vsched.worker.contract import Batch, Sampled, SequenceState, WorkerSettings
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.slots import SlotTable

ADAPTERS = 1000
"""Adapters with lower numbers are loaded."""
ROW_BYTES = 16


def correct_outputs(request: Request) -> list[int]:
    """Return the outputs of a request, which do not depend on scheduling."""
    prompt, count = request.prompt_token_ids, request.sampling.max_tokens
    return answer(prompt, request.items, count, root=_root(request))


def _root(request: Request) -> int:
    """Return the initial fingerprint: requests with different salts share no KV."""
    root = root_of(request.adapter)
    salt = request.cache_salt.encode()
    return extend(root, int.from_bytes(salt, "little")) if salt else root


class SteppedArena:
    """The embeddings of all images, uint8 [pages, page rows, row bytes]."""

    def __init__(
        self, limits: SchedulerLimits, rows: Mapping[bytes, npt.NDArray[np.uint8]] | None = None
    ) -> None:
        """Take the rows of each image by its key, uint8 [tokens, row bytes]; by default those of the symbolic model."""
        self._rows = rows
        row_bytes = next((one.shape[1] for one in (rows or {}).values()), ROW_BYTES)
        shape = max(limits.pages, 1), max(limits.page_rows, 1), row_bytes
        self.embeddings = np.zeros(shape, np.uint8)

    def encode(self, task: EncodeTask) -> None:
        """Write the embedding of an image."""
        known = self._rows
        rows = (
            embedding_rows(task.key, task.tokens, ROW_BYTES) if known is None else known[task.key]
        )
        write_rows(task.pages, rows, self.embeddings)


class _Untimed(Process):
    """The process and the world of a worker without time; errors are raised at once."""

    costs = QUICK
    delays = Delays()

    def __init__(self) -> None:
        super().__init__()
        self.items: dict[int, tuple[MediaItem, ...]] = {}

    def expect(self, condition: object, what: str) -> None:
        assert condition, what

    def violate(self, what: str) -> None:
        raise AssertionError(what)

    hint = violate


class _SteppedWorker(SymbolicGenerator):
    """The symbolic model with the requests of a caller."""

    def __init__(self, limits: SchedulerLimits, request_of: Callable[[int], Request]) -> None:
        self._surroundings = _Untimed()
        self._request_of = request_of
        self._slots = limits.slots
        info = stand_in_info(state_bytes=int(limits.state_snapshots is not None))
        settings = WorkerSettings(
            rank=0,
            ranks=1,
            device="simulated",
            threads=1,
            slots=limits.slots,
            state_snapshots=limits.state_snapshots or 0,
        )
        super().__init__(self._surroundings, self._surroundings, info, settings)  # type: ignore[arg-type] # it has the attributes that are read
        self._adapters = set(range(1, ADAPTERS))
        self.build_kv(blocks=limits.blocks, block_size=limits.block_size)
        if limits.swap_blocks:
            self.build_swap(limits.swap_blocks)

    def prepare(self, sequence: SequenceState) -> None:
        """Look up the images of a request."""
        request = self._request_of(sequence.number)
        assert sequence.adapter == request.adapter, "another adapter than requested"
        items = self._surroundings.items[sequence.number] = request.items
        positions = sequence.prompt_length + sequence.sampling.max_tokens + 1
        sequence.state = Known(items, positions, _root(request))

    def step(self, batch: Batch) -> Sampled:
        """Run a step with at most as many sampled rows as slots."""
        rows = len(batch.decode_slots) + sum(chunk.samples for chunk in batch.chunks)
        assert rows <= self._slots, "more rows to sample than slots"
        return super().step(batch)


class _SteppedDrafts:
    """Drafts the maximum number of tokens for every grant of a group."""

    def __init__(self, group: SteppedGenerator) -> None:
        self._group = group

    def propose(
        self, requested: Mapping[int, int], in_slot: Mapping[int, SequenceState], table: SlotTable
    ) -> dict[int, list[int]]:
        """Return draft tokens by slot: first correct ones, then wrong ones."""
        proposed: dict[int, list[int]] = {}
        for slot, count in requested.items():
            known: Known = in_slot[slot].state
            length = int(table.length[slot])
            seen = int(known.fingerprints[length - 2]) if length > 1 else known.root
            token = int(table.tokens[slot, length - 1])
            luck = self._group.luck
            right = (seen >> 20) % (count + 1) if luck is None else luck(slot, count)
            drafts: list[int] = []
            for position in range(length - 1, length - 1 + count):
                seen = extend(seen, known.content.at(position, token))
                token = next_token(seen) if len(drafts) < right else next_token(seen) + 1
                drafts.append(token)
            proposed[slot] = drafts
        return proposed

    def renew(self, blocks: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """No-op: drafts are not read from blocks."""

    def leave(self, slot: int) -> None:
        """No-op."""


def symbolic_rank(
    group: SteppedGenerator,
    limits: SchedulerLimits,
    arena: SteppedArena,
    request_of: Callable[[int], Request],
) -> GenerateRank:
    """Return an empty rank with the symbolic model; see `SteppedGenerator`."""
    rank = GenerateRank(
        _SteppedWorker(limits, request_of),
        arena.embeddings,
        slots=limits.slots,
        context_tokens=limits.context_tokens,
        block_size=limits.block_size,
        keeps_state=limits.state_snapshots is not None,
        swap_blocks=limits.swap_blocks,
        draft_model=_SteppedDrafts(group),  # type: ignore[arg-type] # it has the methods that a rank calls
    )
    rank.adapters = set(range(1, ADAPTERS))
    return rank


class SteppedGenerator:
    """One generate group.

    Attributes:
        log: Pending decisions.
        luck: Number of accepted draft tokens, given the slot and the number of draft tokens; by
            default a function of the sequence.
    """

    luck: Callable[[int, int], int] | None = None

    def __init__(
        self,
        name: str,
        limits: SchedulerLimits,
        make_rank: Callable[[SteppedGenerator], GenerateRank],
        request_of: Callable[[int], Request],
    ) -> None:
        """Create an empty group; `request_of` looks up requests by number."""
        self.name = name
        self._limits = limits
        self._make_rank = make_rank
        self._request_of = request_of
        self.restart_rank()

    def restart_rank(self) -> None:
        """Forget everything, as a restart does."""
        self.log: deque[GenerateDecision] = deque()
        self._rank = self._make_rank(self)
        self._granted: set[int] = set()

    @property
    def sequences(self) -> dict[int, SequenceState]:
        """The requests that the rank holds, by number."""
        return self._rank._sequences  # noqa: SLF001

    @property
    def slots(self) -> dict[int, int]:
        """The number of the request in each taken slot."""
        in_slot = self._rank._in_slot  # noqa: SLF001
        return {slot: one.number for slot, one in in_slot.items()}

    def step(self) -> tuple[Stepped, list[tuple[int, int]]]:
        """Execute the oldest decision; return its result, and the sampled tokens as (request number, token)."""
        decision = self.log.popleft()
        self._check(decision)
        # Every grant drafts the maximum, whatever its source.
        granted = [msgspec.structs.replace(one, model=True, ngram=0) for one in decision.granted]
        slots = self.slots
        result = self._rank.apply(msgspec.structs.replace(decision, granted=granted))
        slots |= self.slots
        tokens = array("i")
        tokens.frombytes(result.tokens)
        sampled = [(slots[slot], token) for slot, token in enumerate(tokens) if token >= 0]
        sampled += [(slots[one.slot], token) for one in result.drafted for token in one.tokens]
        # The time depends on the step, as real times do, and is sometimes unknown.
        prefilled = sum((chunk.stop - chunk.start) * (1 + chunk.stop) for chunk in decision.chunks)
        busy_ns = decision.step % 7 * (1 + prefilled)
        blocks = result.swap_blocks
        swap_ns = min(busy_ns, 3 * blocks)
        stepped = Stepped(
            decision.step,
            tokens,
            result.finished,
            busy_ns,
            self.name,
            result.drafted,
            swap_ns,
            blocks,
        )
        return stepped, sampled

    def end_sequence(self, slot: int) -> None:
        """End the sequence in a slot before its length, as a rank does whose grammar is complete."""
        self._rank._table.decoding[slot] = False  # noqa: SLF001

    # --- checks of decisions ---

    def _check(self, decision: GenerateDecision) -> None:
        """Check a decision against the state that it is applied to."""
        table, size = self._rank._table, self._limits.block_size  # noqa: SLF001
        left = {one.slot for one in decision.left}
        joined = {one.slot: one for one in decision.joined}
        self._granted -= left
        self._granted |= {one.slot for one in decision.granted}
        assert self._limits.drafts or not decision.granted, "a grant for ranks that cannot draft"
        for slot in decision.grown[::2]:
            if slot not in joined and slot not in self._granted and table.decoding[slot]:
                full = table.length[slot] - 1 == table.block_count[slot] * size
                assert full, f"slot {slot} gets a block before it needs one"
        if decision.swaps is not None:
            for written in (decision.swaps.out[1::2], decision.swaps.back[1::2]):
                assert len(set(written)) == len(written), "two copies have the same target"
        for join in decision.joined:
            self._granted.discard(join.slot)
            known = join.data or self.sequences[join.number]
            if known.sampling.prompt_logprobs is not None:
                prompt = join.length == known.prompt_length
                assert not (prompt and join.computed), "no log-probabilities of cached tokens"
        self._granted |= {one.slot for one in decision.granted}
        for chunk in decision.chunks:
            self._check_chunk(chunk, joined.get(chunk.slot))

    def _check_chunk(self, chunk: ChunkPlan, join: Join | None) -> None:
        if join is None:
            number = self.slots[chunk.slot]
            state = self.sequences[number].state
            computed = state.length if isinstance(state, Known) else chunk.start
            assert not self._rank._table.decoding[chunk.slot], "a chunk of a sequence that decodes"  # noqa: SLF001
        else:
            number, computed = join.number, join.computed
        assert chunk.start == computed, "a chunk does not begin at the end of the previous one"
        request = self._request_of(number)
        atoms: Sequence[tuple[int, int]] = ()
        if self._limits.prompt_atomic:
            atoms = [(0, len(request.prompt_token_ids))]
        elif self._limits.item_atomic:
            atoms = [atom for item in request.items for atom in item.atoms]
        cut = [one for one in atoms if one[0] < chunk.stop < one[1]]
        assert not cut, f"a chunk that ends at {chunk.stop} cuts {cut}"
        due = [
            item.offset
            for item in request.items
            if item.offset < chunk.stop and item.end > chunk.start
        ]
        assert [item.offset for item in chunk.items] == due, "the images of a chunk"
