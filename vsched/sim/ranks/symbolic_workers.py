"""Workers of simulated ranks: they run no model, but verify everything they read and write.

An encoder's output depends on the pixels it reads. A generator checks that the embeddings in the
arena belong to its images, and stores fingerprints in a KV cache of real blocks, read through block
tables. If the model has a recurrent state, each slot also stores the fingerprint of its last token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from vsched.errors import DeviceOutOfMemory
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.sim.ranks.symbolic_model import (
    DRAFT,
    PIXELS,
    ROOT,
    Content,
    allowed_tokens,
    chosen_token,
    drafted_token,
    embedding_rows,
    extend,
    image_metadata,
    next_token,
    root_of,
)
from vsched.sim.world import World
from vsched.types import MediaItem, ModelInfo
from vsched.worker.contract import (
    Batch,
    Chunk,
    EncodeJob,
    EncodeWorker,
    GenerateWorker,
    Sampled,
    SequenceState,
    Worker,
    WorkerSettings,
)


def stand_in_info(**facts: object) -> ModelInfo:
    """Return the facts of a small model with short contexts; `facts` override defaults."""
    small: dict[str, object] = {
        "family": "fake",
        "path": "",
        "dtype": "float32",
        "hidden_size": 4,
        "embedding_levels": 1,
        "vocab_size": 100,
        "context_tokens": 1000,
        "kv_bytes_per_token": 8,
        "item_tokens_max": 32,
        "image_token_id": 5,
        "stop_token_ids": (),
    }
    return ModelInfo(**{**small, **facts})  # type: ignore[arg-type] # the keys are valid fields


class StandInWorker(Worker):
    """Memory of a worker: allocates its weights on creation.

    Attributes:
        memory: The simulated device.
    """

    def __init__(self, memory: SimulatedMemory, *, weights_bytes: int = 0) -> None:
        self.memory = memory
        self.weights_bytes = weights_bytes
        if weights_bytes:
            memory.allocate(weights_bytes)

    def device_memory(self) -> SimulatedMemory:
        """Return the simulated device."""
        return self.memory


class StandInEncoder(StandInWorker, EncodeWorker):
    """A vision tower that does not write to the arena."""

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Encode nothing."""


class StandInGenerator(StandInWorker, GenerateWorker):
    """A language model with a KV cache on the simulated device, in one allocation; it yields token 1 for every row."""

    def __init__(
        self,
        memory: SimulatedMemory,
        *,
        kv_bytes_per_token: int,
        weights_bytes: int = 0,
        state_bytes: int = 0,
    ) -> None:
        """Allocate the weights; `state_bytes` is the recurrent state of all slots, allocated with the KV cache."""
        super().__init__(memory, weights_bytes=weights_bytes)
        self._kv_bytes_per_token = kv_bytes_per_token
        self._state_bytes = state_bytes
        self._kv: list[int] = []

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        """Allocate the KV cache, replacing the previous one.

        Raises:
            DeviceOutOfMemory: When it does not fit.
        """
        del touch
        self.drop_kv()
        kv_bytes = blocks * block_size * self._kv_bytes_per_token
        for size in (kv_bytes, self._state_bytes):
            if size:
                self._kv.append(self.memory.allocate(size))

    def drop_kv(self) -> None:
        """Free the KV cache."""
        for handle in self._kv:
            self.memory.free(handle)
        self._kv = []

    def step(self, batch: Batch) -> Sampled:
        """Yield a token for every row."""
        rows = len(batch.decode_slots) + sum(chunk.samples for chunk in batch.chunks)
        return Sampled(np.ones(rows, np.int32))


WEIGHTS_BYTES = 256 << 20
ENCODE_LAYERS = 8
"""Layers of the vision tower."""
DAMAGED = b"damaged"
"""Replaces the key of an image with wrong pixels."""
DAMAGE = 0xBAD
"""Changes the fingerprint if embeddings are wrong."""
ADAPTER_BYTES = 4 << 20
"""Memory per adapter slot."""
ACTIVATION_BYTES = 1 << 20
"""Activation memory per token of a step."""


class Process:
    """The process of a worker: without time, faults or a limit of memory, unless a subclass adds them.

    Attributes:
        serving: Whether the KV cache is accepted; steps before that are profiling runs.
    """

    serving = True

    def __init__(self) -> None:
        self.memory = SimulatedMemory(1 << 40)

    def spend(self, duration_ns: float) -> None:
        """Advance this rank's clock."""

    def spend_step(self, duration_ns: float) -> None:
        """Advance the clock by a step, including slowdowns and hangs."""

    def at_end(self, call: Callable[[], None]) -> None:
        """Schedule a call for the end of the step; it is dropped if the process ends before."""
        call()

    def has_memory(self, stage: str, during: str) -> bool:
        """Return False once for each due `OutOfMemory` fault."""
        del stage, during
        return True


class SymbolicEncoder(StandInEncoder):
    """The vision tower of one rank."""

    pauses = True

    def __init__(self, world: World, process: Process, settings: WorkerSettings) -> None:
        _load(process, world, "encode")
        super().__init__(process.memory, weights_bytes=WEIGHTS_BYTES)
        self._world = world
        self._process = process
        self._threads = settings.threads
        self._writes = settings.rank == 0
        self._jobs: Sequence[EncodeJob] = ()
        self._left = 0

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Encode a batch."""
        world, process = self._world, self._process
        tokens = [job.tokens for job in jobs]
        if not process.serving:
            with process.memory.hold(ACTIVATION_BYTES * sum(tokens)):
                return
        process.spend_step(world.costs.encode_ns(tokens))
        self._need_memory()
        self._finish(jobs, embeddings)

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Begin a batch that is encoded layer by layer."""
        self._jobs, self._embeddings, self._left = jobs, embeddings, ENCODE_LAYERS

    def advance(self, layers: int) -> bool:
        """Encode the next `layers` layers, 0 for all remaining; the rows are written at the end."""
        assert self._left, "no batch was begun"
        layers = min(layers or self._left, self._left)
        whole_ns = self._world.costs.encode_ns([job.tokens for job in self._jobs])
        self._process.spend_step(whole_ns * layers / ENCODE_LAYERS)
        self._need_memory()
        self._left -= layers
        if self._left:
            return False
        self._finish(self._jobs, self._embeddings)
        return True

    def threads_here(self) -> int:
        """Return the constant number of threads."""
        return self._threads

    def _need_memory(self) -> None:
        if not self._process.has_memory("encode", "step"):
            raise DeviceOutOfMemory("injected: no memory for the activations of a batch of images")

    def _finish(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        for job in jobs:
            seen = job.key if self._sees(job) else DAMAGED
            if self._writes:
                rows = embedding_rows(seen, job.tokens, embeddings.shape[2])
                self._process.at_end(partial(write_rows, job.pages, rows, embeddings))

    def _sees(self, job: EncodeJob) -> bool:
        """Return True if the pixels belong to the expected image.

        They may be wrong if no request needs the image any more: its embeddings are discarded.
        """
        look = self._world.appearances[job.key]
        expected = np.array([*look.colour, look.tokens], np.float32)
        self._world.expect(job.tokens == look.tokens, f"{look} is encoded as {job.tokens} tokens")
        return job.metadata == image_metadata(look.tokens) and bool(
            (job.arrays[PIXELS] == expected).all()
        )


def write_rows(
    pages: Sequence[int], rows: npt.NDArray[np.uint8], embeddings: npt.NDArray[np.uint8]
) -> None:
    """Write the embedding of an image to its pages."""
    page_rows = embeddings.shape[1]
    for index, page in enumerate(pages):
        part = rows[index * page_rows : (index + 1) * page_rows]
        embeddings[page, : len(part)] = part


class Known:
    """Computed fingerprints of a sequence in a generator, uint64 [positions]."""

    def __init__(self, items: Sequence[MediaItem], positions: int, root: int) -> None:
        self.root = root
        self.content = Content(items)
        self.fingerprints = np.zeros(positions, np.uint64)
        self.length = 0

    def grow(self, sequence: SequenceState, length: int, seen: int) -> None:
        """Compute the fingerprints up to a length."""
        tokens = sequence.tokens[self.length : length].tolist()
        for position, token in enumerate(tokens, self.length):
            seen = extend(seen, self.content.at(position, token))
            self.fingerprints[position] = seen
        self.length = length


class SymbolicGenerator(StandInGenerator):
    """The language model of one rank."""

    def __init__(
        self, world: World, process: Process, info: ModelInfo, settings: WorkerSettings
    ) -> None:
        _load(process, world, "generate")
        super().__init__(
            process.memory,
            kv_bytes_per_token=info.kv_bytes_per_token,
            weights_bytes=WEIGHTS_BYTES,
            state_bytes=(settings.slots + settings.state_snapshots) * info.state_bytes,
        )
        self._states: dict[int, int] | None = {} if info.state_bytes else None
        self._snapshots: dict[int, int] = {}
        self._world = world
        self._process = process
        self._threads = settings.threads
        self._who = f"rank {settings.rank}"
        self._adapters: set[int] = set()
        self._adapters_max = settings.adapters
        self.adapter_bytes = settings.adapters * ADAPTER_BYTES
        if settings.adapters:
            process.memory.allocate(self.adapter_bytes)
        self._blocks: npt.NDArray[np.uint64] = np.zeros((0, 1), np.uint64)
        self._swap_slots = self._blocks
        self._block_bytes = 0

    def threads_here(self) -> int:
        """Return the constant number of threads."""
        return self._threads

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        """Allocate a KV cache."""
        self.drop_kv()
        self._process.spend(self._world.delays.build_ns)
        if not self._process.has_memory("generate", "load"):
            raise DeviceOutOfMemory(f"injected: no memory for a KV cache of {blocks} blocks")
        super().build_kv(blocks=blocks, block_size=block_size, touch=touch)
        self._blocks = np.zeros((blocks, block_size), np.uint64)
        self._block_bytes = block_size * self._kv_bytes_per_token

    def build_swap(self, blocks: int) -> None:
        """Allocate swap memory."""
        self._process.spend(self._world.delays.build_ns)
        if not self._process.has_memory("generate", "load"):
            raise DeviceOutOfMemory(f"injected: the host has no memory for {blocks} blocks")
        self._swap_slots = np.zeros((blocks, self._blocks.shape[1]), np.uint64)

    def swap(self, out: npt.NDArray[np.int32], back: npt.NDArray[np.int32]) -> None:
        """Copy blocks to swap and back; a slot is cleared when it is read."""
        self._process.spend(self._world.costs.swap_ns((len(out) + len(back)) * self._block_bytes))
        self._swap_slots[out[:, 1]] = self._blocks[out[:, 0]]
        self._blocks[back[:, 1]] = self._swap_slots[back[:, 0]]
        self._swap_slots[back[:, 0]] = 0

    def add_adapter(self, number: int, path: str) -> None:
        """Add an adapter, which is represented by its number only."""
        del path
        self._process.spend(self._world.delays.build_ns)
        self._world.expect(
            number not in self._adapters and len(self._adapters) < self._adapters_max,
            f"{self._who}: adapter {number} is added to {self._adapters}",
        )
        self._adapters.add(number)

    def add_trial_adapter(self, number: int) -> None:
        """Add an adapter for profiling."""
        self.add_adapter(number, "")

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter."""
        self._adapters.discard(number)

    def prepare(self, sequence: SequenceState) -> None:
        """Look up the images of a request."""
        items = self._world.items[sequence.number] if self._process.serving else ()
        for place in sequence.items if items else ():
            self._world.expect(
                place.metadata == image_metadata(place.tokens), f"{place} is of another image"
            )
        positions = sequence.prompt_length + sequence.sampling.max_tokens + 1
        sequence.state = Known(items, positions, root_of(sequence.adapter))

    def step(self, batch: Batch) -> Sampled:
        """Run one step."""
        if not self._process.serving:
            return self._rehearse(batch)
        self._process.spend_step(self._cost_ns(batch))
        if not self._process.has_memory("generate", "step"):
            raise DeviceOutOfMemory("injected: no memory for the activations of a step")
        if self._states is not None:
            self._states |= {slot: self._snapshots[place] for slot, place in batch.restored}
        tokens: list[int] = []
        decodes = zip(
            batch.decode_slots.tolist(),
            batch.decode_sequences,
            batch.decode_positions.tolist(),
            strict=True,
        )
        special = dict(batch.special)
        for row, (slot, sequence, position) in enumerate(decodes):
            requested = special.get(row, sequence)
            tokens.append(self._compute_kv(batch, slot, requested, position, position + 1))
        for chunk in batch.chunks:
            damage = 0 if self._sees_items(chunk, batch.embeddings) else DAMAGE
            token = self._compute_kv(
                batch, chunk.slot, chunk.sequence, chunk.start, chunk.stop, damage=damage
            )
            for end, place in chunk.writes:
                known: Known = chunk.sequence.state
                self._snapshots[place] = int(known.fingerprints[end - 1])
            if chunk.samples:
                tokens.append(token)
        return Sampled(np.asarray(tokens, np.int32))

    def _compute_kv(
        self,
        batch: Batch,
        slot: int,
        sequence: SequenceState,
        start: int,
        stop: int,
        *,
        damage: int = 0,
    ) -> int:
        """Compute the KV of positions [start, stop) from all earlier ones; return the next token."""
        known: Known = sequence.state
        if sequence.adapter and sequence.adapter not in self._adapters:
            self._world.violate(
                f"{self._who}: request {sequence.number} runs without its adapter {sequence.adapter}"
            )
        size = self._blocks.shape[1]
        blocks = batch.block_tables[slot, : -(-stop // size)]
        kv = self._blocks[blocks].reshape(-1)
        if known.length < start:  # a prefix computed by another request
            seen = int(known.fingerprints[known.length - 1]) if known.length else known.root
            known.grow(sequence, start, seen)
        if not (kv[:start] == known.fingerprints[:start]).all():
            position = int(np.flatnonzero(kv[:start] != known.fingerprints[:start])[0])
            self._world.violate(
                f"{self._who}: request {sequence.number} reads KV of position {position} that is not its own"
            )
        seen = int(kv[start - 1]) if start else known.root
        known.length = start
        known.grow(sequence, stop, seen ^ damage)
        if self._states is not None:
            if start and self._states.get(slot) != seen:
                self._world.violate(
                    f"{self._who}: request {sequence.number} goes on at {start} from the state of another request"
                )
            self._states[slot] = int(known.fingerprints[stop - 1])
        if stop == start + 1:
            self._blocks[blocks[start // size], start % size] = known.fingerprints[start]
        else:
            positions = np.arange(start, stop)
            written = blocks[positions // size], positions % size
            self._blocks[written] = known.fingerprints[start:stop]
        return self._following(sequence, int(known.fingerprints[stop - 1]))

    def _following(self, sequence: SequenceState, seen: int) -> int:
        """Return the token that follows a position."""
        if sequence.token_mask is not None:
            return chosen_token(seen, allowed_tokens(sequence.token_mask))
        return next_token(seen)

    def _sees_items(self, chunk: Chunk, embeddings: npt.NDArray[np.uint8]) -> bool:
        """Return True if the embeddings belong to the images.

        They may be wrong in a rank that is being replaced, since the results of its steps are
        discarded.
        """
        if not chunk.items:
            return True
        items = self._world.items[chunk.sequence.number]
        for rows in chunk.items:
            item = items[rows.index]
            expected = embedding_rows(item.key, item.tokens, embeddings.shape[2])
            found = embeddings[list(rows.pages)].reshape(-1, embeddings.shape[2])
            part = slice(rows.row_start, rows.row_stop)
            if not (found[part] == expected[part]).all():
                number = chunk.sequence.number
                self._world.hint(
                    f"{self._who}: request {number} read an embedding that was not its own"
                )
                return False
        return True

    def _rehearse(self, batch: Batch) -> Sampled:
        rows = len(batch.decode_slots) + sum(chunk.stop - chunk.start for chunk in batch.chunks)
        with self._process.memory.hold(ACTIVATION_BYTES * max(rows, 1)):
            sampled = len(batch.decode_slots) + sum(chunk.samples for chunk in batch.chunks)
            return Sampled(np.zeros(sampled, np.int32))

    def _cost_ns(self, batch: Batch) -> float:
        chunks = batch.chunks
        return self._world.costs.generate_ns(
            decodes=len(batch.decode_slots),
            context=int(batch.decode_positions.sum()),
            prefill=sum(chunk.stop - chunk.start for chunk in chunks),
            pairs=sum((chunk.stop**2 - chunk.start**2) / 2 for chunk in chunks),
        )


class SymbolicDraft(SymbolicGenerator):
    """A draft model: faster, without images, and correct only sometimes."""

    TIME = 0.2
    """Step time as a share of the target model's."""

    def __init__(
        self, world: World, process: Process, info: ModelInfo, settings: WorkerSettings
    ) -> None:
        super().__init__(world, process, info, settings)
        self._who += ", drafting"
        self._acceptance = float(info.path.removeprefix(DRAFT))

    def prepare(self, sequence: SequenceState) -> None:
        """Start to follow a request."""
        positions = sequence.prompt_length + sequence.sampling.max_tokens + 1
        sequence.state = Known((), positions, ROOT)

    def _following(self, sequence: SequenceState, seen: int) -> int:
        return drafted_token(seen, self._acceptance)

    def _cost_ns(self, batch: Batch) -> float:
        return self.TIME * super()._cost_ns(batch)


def _load(process: Process, world: World, stage: str) -> None:
    """Spend the time of loading weights.

    Raises:
        DeviceOutOfMemory: When an `OutOfMemory` fault is due.
    """
    process.spend(world.delays.load_ns)
    if not process.has_memory(stage, "load"):
        raise DeviceOutOfMemory(f"injected: no memory for the weights of {stage}")
