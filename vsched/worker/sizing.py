"""The memory of a rank, measured before it serves: the encoder's largest batch, and KV caches with the largest steps.

# The largest batch of images

The plug-in names candidates for this batch. They are really computed, with arrays and pages of their own. Like the
arena, these are in shared mappings that exist before the measurement, so they are not counted.

The same batch may need more memory when it runs again, because kept allocations of the first run (compiled code,
caches, small objects) fragment the memory. So the candidate with the highest peak is repeated until it adds almost
nothing. Additional memory of batches with other shapes, because of fragmentation, is the `drift` of the device memory.

# KV caches

The engine orders KV caches while it looks for their size. Each order starts by tearing down the previous cache, and by
checking that its memory was released: memory that a stray reference keeps would be missing from every later attempt,
and no smaller cache would help.

# The profiling run

The steps are real: decisions, followed by a separate `GenerateRank` and executed by the worker, including the sampler.
Block tables repeat the same few blocks, and image rows the same few pages, so any context can run on a KV cache of any
size; the written values are meaningless.

The memory of a step depends on its rows, on the total of computed tokens of its sequences (tables, masks), on the
largest product of a chunk and its context (scores, masks), and on images and sampling. Here every chunk is full of
image rows, and every row that samples uses all sampling options. The steps:

1. If step 2 has no chunk of full length: the whole budget as prefill in few slots.
2. The whole budget as prefill in all slots: as many chunks of full length as possible with at least a token for every
   other slot. Every chunk ends its prompt just below the maximum context.
3. Decode just below the maximum context in all slots.
4. Chunks of full length in as few slots as possible for the rest of the budget, decode in all others.
5. With recurrent layers: one chunk of full length from position 0.

Steps with fewer chunks lie between 3 and 4, and steps with fewer decodes between 4 and 2. Their memory is a sum of
terms proportional to one of the two numbers, or the maximum of two such terms, so the maximum is at an end of each
range.

In step 2, on a GPU, every chunk gathers its context in every layer, for seconds. Layers need no more memory one after
the other than alone, so it computes two of each kind, if the worker can skip layers; the other steps compute all.

On a CPU this would take minutes. But there freed memory is returned, so a worker can be `frugal`: every layer frees
all that it allocates, and allocates for one sequence at a time. Then two layers reach the peak (the second starts
while the input of the first is still held), and one chunk at the maximum context is sufficient; the others are short
prompts. Compared with step 4, step 2 then adds only the state of the requests, which a step without layers creates.
"""

from __future__ import annotations

import gc
import logging
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import DeviceOutOfMemory
from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
)
from vsched.memory import Ledger, LedgerLine, Sized
from vsched.policy import RankMemory, Reservation
from vsched.types import ItemPlace, ModelInfo, SamplingParams
from vsched.wire import SizeKv
from vsched.worker.contract import (
    Arrays,
    EncodeJob,
    EncodeWorker,
    GenerateWorker,
    ImagePlan,
    Worker,
    WorkerPlugin,
    extent_bytes,
    view_arrays,
)
from vsched.worker.drafts import DraftWorker
from vsched.worker.generate_rank import GenerateRank
from vsched.worker.memory import KV_REMEDY, DeviceMemory, memory_errors
from vsched.worker.spec import PROFILE_OUTPUTS, EncodeRole, StepLimits


def measure_rank(worker: Worker, rank: int) -> RankMemory:
    """Return the memory that a rank holds on its device now, and the free memory there."""
    memory = worker.device_memory()
    return RankMemory(
        rank=rank,
        pool=memory.pool,
        total_bytes=memory.total(),
        available_bytes=memory.available(),
        reserved_bytes=memory.reserved(),
        weights_bytes=worker.weights_bytes,
        adapter_bytes=worker.adapter_bytes,
    )


@contextmanager
def trial_adapter(worker: Worker) -> Iterator[int]:
    """Add an adapter of the maximum rank within the context; yield its number, or 0 without adapters.

    There are no other adapters while memory is measured, so its number is free.
    """
    if not worker.adapter_bytes:
        yield 0
        return
    worker.add_trial_adapter(1)
    try:
        yield 1
    finally:
        worker.remove_adapter(1)


_PAGE_ROWS = 64

_SAMPLING = SamplingParams(
    max_tokens=PROFILE_OUTPUTS, temperature=1.0, top_p=0.95, repetition_penalty=1.1, logprobs=20
)


def image_for(
    plugin: WorkerPlugin, info: ModelInfo, limits: StepLimits, *, pixels_max: int
) -> ImagePlan | None:
    """Return the largest image that fits in a prompt; None without images, or if the plug-in reports none."""
    room = min(info.item_tokens_max, limits.prompt_tokens - 1)
    if pixels_max < 1 or room < 1:
        return None
    capped = msgspec.structs.replace(info, item_tokens_max=room)
    batches = plugin.worst_batches(capped, items=1, tokens=0, pixels_max=pixels_max) or []
    return max((batch[0] for batch in batches), key=lambda plan: plan.tokens, default=None)


def run_profile(
    worker: GenerateWorker,
    info: ModelInfo,
    limits: StepLimits,
    *,
    blocks: int,
    image: ImagePlan | None,
    adapter: int = 0,
) -> int:
    """Execute the profiling run on the current KV cache of `blocks` blocks; return the number of steps.

    `image` is the image in chunks, None for text only; `adapter` is the adapter of all rows, 0 for none. Layers process
    the rows of different adapters in turn, so memory is highest if all have the same.

    Raises:
        DeviceOutOfMemory: From the worker.
    """
    writer = _DecisionWriter(info, limits, blocks=blocks, image=image, adapter=adapter)
    rank = GenerateRank(
        worker,
        writer.embeddings,
        slots=limits.slots,
        context_tokens=limits.length_max,
        block_size=limits.block_size,
    )
    rank.adapters.add(adapter)
    steps = 0
    whole = writer.whole(_LAYERS if worker.skips_layers else None)
    for decision, layers in writer.frugal() if worker.frugal else whole:
        with nullcontext() if layers is None else worker.first_layers(layers):
            rank.apply(decision)
        steps += 1
    return steps


def spread(limits: StepLimits) -> list[int]:
    """Return the chunk lengths of a step that uses the budget in all slots, full chunks first."""
    lengths: list[int] = []
    left = limits.batch_tokens
    for later in range(limits.slots - 1, -1, -1):
        lengths.append(min(limits.chunk_max, left - later))
        left -= lengths[-1]
    return lengths


def heap(limits: StepLimits, budget: int) -> list[int]:
    """Return the chunk lengths of a step that uses a budget in as few slots as possible."""
    full, rest = divmod(budget, limits.chunk_max)
    lengths = [limits.chunk_max] * full + ([rest] if rest else [])
    return lengths[: limits.slots]


def chunks_next_to_decodes(limits: StepLimits) -> list[int]:
    """Return the chunk lengths of a step with decode rows in all other slots."""
    for prefilling in range(1, limits.slots):
        left = limits.batch_tokens - (limits.slots - prefilling)
        if left <= prefilling * limits.chunk_max:
            return heap(limits, left)
    return heap(limits, limits.batch_tokens)


Step = tuple[GenerateDecision, int | None]
"""A step, and the number of layers of each kind that it computes; None for all."""

_LAYERS = 2


class _DecisionWriter:
    """Creates the decisions of a profiling run."""

    def __init__(
        self,
        info: ModelInfo,
        limits: StepLimits,
        *,
        blocks: int,
        image: ImagePlan | None,
        adapter: int,
    ) -> None:
        self._limits = limits
        self._info = info
        self._image = image
        self._adapter = adapter
        self._step = 0
        self._number = 0
        self._slot_requests: dict[int, int] = {}
        self._blocks = [
            index % blocks for index in range(-(-limits.length_max // limits.block_size))
        ]
        self._data: dict[int, RequestData] = {}
        self.embeddings: npt.NDArray[np.uint8] = np.zeros(
            (1, _PAGE_ROWS, info.embedding_row_bytes), np.uint8
        )

    def whole(self, layers_of_many: int | None) -> Iterator[Step]:
        """Yield the steps; each must be executed before the next. `layers_of_many` is for chunks in all slots."""
        few, many = heap(self._limits, self._limits.batch_tokens), spread(self._limits)
        if few[0] > many[0]:
            yield self._prefill(few, long=len(few)), None
        yield self._prefill(many, long=len(many)), layers_of_many
        yield self._decode(), None
        mixed = chunks_next_to_decodes(self._limits)
        yield self._prefill(mixed, long=len(mixed)), None
        yield from self._beginning(None)

    def frugal(self) -> Iterator[Step]:
        """Yield the steps for a frugal worker."""
        few, mixed = (
            heap(self._limits, self._limits.batch_tokens),
            chunks_next_to_decodes(self._limits),
        )
        if few[0] > mixed[0]:
            yield self._prefill(few, long=1), _LAYERS
        yield self._prefill([1] * self._limits.slots, long=self._limits.slots), 0
        yield self._decode(), _LAYERS
        yield self._prefill(mixed, long=1), _LAYERS
        yield from self._beginning(_LAYERS)

    def _beginning(self, layers: int | None) -> Iterator[Step]:
        """Yield a chunk of full length from position 0, where recurrent layers may compute differently."""
        if self._info.state_bytes:
            yield self._prefill([self._limits.chunk_max], long=0), layers

    def _decode(self) -> GenerateDecision:
        self._step += 1
        return GenerateDecision(self._step)

    def _prefill(self, lengths: list[int], *, long: int) -> GenerateDecision:
        """Prefill the last chunks of new requests in the first slots, in place of their present requests.

        The first `long` of them have the maximum prompt length, the others only their chunk.
        """
        left, joined, chunks = [], [], []
        for slot, length in enumerate(lengths):
            if slot in self._slot_requests:
                left.append(Leave(self._slot_requests[slot], slot, keep=False))
            self._number += 1
            self._slot_requests[slot] = self._number
            stop = self._limits.prompt_tokens if slot < long else length
            data = self._request(stop)
            joined.append(Join(self._number, slot, stop - length, stop, self._blocks, data))
            items = [
                ChunkItem(item.offset, item.tokens, [0] * -(-item.tokens // _PAGE_ROWS))
                for item in data.items
                if item.offset + item.tokens > stop - length
            ]
            chunks.append(ChunkPlan(slot, stop - length, stop, items))
        self._step += 1
        return GenerateDecision(self._step, left=left, joined=joined, chunks=chunks)

    def _request(self, prompt_tokens: int) -> RequestData:
        known = self._data.get(prompt_tokens)
        if known is not None:
            return known
        prompt = np.full(prompt_tokens, 1 if self._info.image_token_id == 0 else 0, np.int32)
        places = self._places(prompt_tokens)
        for place in places:
            prompt[place.offset : place.offset + place.tokens] = self._info.placeholder
        self._data[prompt_tokens] = RequestData(
            tokens=prompt.tobytes(),
            prompt_length=prompt_tokens,
            items=places,
            sampling=_SAMPLING,
            stop_token_ids=(),
            adapter=self._adapter,
        )
        return self._data[prompt_tokens]

    def _places(self, prompt_tokens: int) -> list[ItemPlace]:
        """Fill the longest chunk with images from its end, with a text token after each to separate them."""
        places: list[ItemPlace] = []
        image, end = self._image, prompt_tokens - 1
        while image and end > max(prompt_tokens - self._limits.chunk_max, image.tokens - 1):
            places.append(ItemPlace(end - image.tokens, image.tokens, image.metadata))
            end -= image.tokens + 1
        return places[::-1]


LEAK_SLACK_BYTES = 1 << 20
"""Memory that may stay without being a leak: small allocations share pages with others."""

KEPT_MAX_BYTES = 64 << 20
"""Memory that libraries may keep after their first use, such as workspaces and tables."""


class KvBuilder:
    """The KV cache of one generate rank, until it is accepted; with a draft model, the caches of both.

    Attributes:
        blocks: Number of blocks of the current KV cache; 0 without one.
    """

    def __init__(
        self,
        worker: GenerateWorker,
        info: ModelInfo,
        limits: StepLimits,
        *,
        rank: int = 0,
        image: ImagePlan | None = None,
        draft: DraftWorker | None = None,
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        """Prepare; the weights are loaded.

        `image` fills the rows of the profiling run, None for text alone. `draft` has a KV cache of as many blocks, and
        a profiling run of its own.
        """
        self.blocks = 0
        self._workers = [worker] if draft is None else [worker, draft.worker]
        self._draft = draft
        self._collect = collect
        self._worker = worker
        self._info = info
        self._limits = limits
        self._rank = rank
        self._image = image
        self._memory = worker.device_memory()
        self._loaded_bytes: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the current KV cache."""
        draft = 0 if self._draft is None else self._draft.info.kv_bytes_per_token
        return self.blocks * self._limits.block_size * (self._info.kv_bytes_per_token + draft)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots and of snapshots, which are built with the KV cache."""
        count = self._limits.slots + self._limits.state_snapshots
        return count * self._info.state_bytes if self.blocks else 0

    def measure(self) -> RankMemory:
        """Measure held and free memory; after loading, the memory policy starts from this."""
        self._collect()
        self._memory.release()
        self._loaded_bytes = self._memory.allocated()
        return self._measured()

    def carry_out(self, order: SizeKv) -> Sized:
        """Tear down the current KV cache, build the ordered one, and run the largest steps while headroom is held.

        The new cache remains until the next order, whatever the outcome; the headroom does not.
        """
        if order.reset_peers:
            self._abort()
        expected = self.kv_bytes + self.state_bytes
        released = self._tear_down()
        message = self._leak(released, expected)
        if message:
            memory = self._measured(released_bytes=released)
            self._abort()
            return Sized(outcome="leak", message=message, memory=memory)
        if not order.tokens:
            return Sized(outcome="fits", message="", memory=self._measured(released_bytes=released))
        self._memory.reset_peak()
        doing = "building the KV cache"
        try:
            with memory_errors(doing, remedy=KV_REMEDY):
                blocks = order.tokens // self._limits.block_size
                assert blocks, "the engine orders at least one block"
                for worker in self._workers:
                    worker.build_kv(
                        blocks=blocks, block_size=self._limits.block_size, touch=order.profile
                    )
                self.blocks = blocks
            doing = f"holding headroom of {order.headroom_bytes} bytes"
            with self._memory.hold(order.headroom_bytes):
                doing = "running the hardest steps"
                if order.profile:
                    with memory_errors(doing, remedy=KV_REMEDY):
                        self._run_profile(probe=order.probe)
                memory = self._measured(peak_bytes=self._memory.peak(), released_bytes=released)
                return Sized(outcome="fits", message="", memory=memory)
        except DeviceOutOfMemory as error:
            # Only its text is kept: the traceback refers to the memory of the failed step. The remedy is left out:
            # the policy has a better one.
            message = f"{doing} of {order.tokens} tokens: {error.summary}"
        self._abort()
        memory = self._measured(peak_bytes=self._memory.peak(), released_bytes=released)
        return Sized(outcome="out_of_memory", message=message, memory=memory)

    def _leak(self, released: int, expected: int) -> str:
        """Return what a teardown left behind, in a sentence; empty without a leak.

        A captured graph, an attention kernel or held headroom may stay although the KV cache was released. That is
        found by comparison with the memory after loading, with an allocator that keeps nothing for itself.
        """
        if released + LEAK_SLACK_BYTES < expected:
            return (
                "the KV cache was dropped and its memory did not come back (bytes released): "
                f"value {released}, limit at least {expected}"
            )
        if self._loaded_bytes is None or self._memory.drift(KEPT_MAX_BYTES):
            return ""
        kept = self._memory.allocated() - self._loaded_bytes
        if kept <= KEPT_MAX_BYTES:
            return ""
        return (
            "more memory is in use than after loading, without a KV cache (bytes): "
            f"value {kept}, limit {KEPT_MAX_BYTES}"
        )

    def settle(self) -> None:
        """Note that the current KV cache is accepted."""
        self._memory.settle()

    def _abort(self) -> None:
        """Make the steps of peers fail, too: they may wait for this rank in one."""
        for worker in self._workers:
            worker.abort()

    def _tear_down(self) -> int:
        """Drop graphs and KV caches; return the number of released bytes.

        In this order: captured graphs point into the request state and the cache, request state into the cache. The
        requests of the profiling run were dropped with its rank.
        """
        self._collect()
        before = self._memory.allocated()
        for worker in self._workers:
            worker.drop_graphs()
            worker.drop_kv()
        self.blocks = 0
        self._collect()
        released = before - self._memory.allocated()
        self._memory.release()
        return released

    def _run_profile(self, *, probe: bool) -> None:
        limits = self._limits
        if not probe:
            # A sequence longer than the cache is refused when it arrives. A probe stands for caches of any size.
            tokens = self.blocks * limits.block_size
            limits = msgspec.structs.replace(
                limits, context_tokens=min(limits.context_tokens, tokens)
            )
        with trial_adapter(self._worker) as adapter:
            run_profile(
                self._worker,
                self._info,
                limits,
                blocks=self.blocks,
                image=self._image,
                adapter=adapter,
            )
        if self._draft is not None:
            worker, info = self._draft
            context = min(limits.context_tokens, info.context_tokens)
            own = msgspec.structs.replace(limits, context_tokens=context)
            run_profile(worker, info, own, blocks=self.blocks, image=None)

    def _measured(self, *, peak_bytes: int = 0, released_bytes: int = 0) -> RankMemory:
        return msgspec.structs.replace(
            measure_rank(self._worker, self._rank),
            draft_bytes=0 if self._draft is None else self._draft.worker.weights_bytes,
            peak_bytes=peak_bytes,
            kv_bytes=self.kv_bytes,
            state_bytes=self.state_bytes,
            released_bytes=released_bytes,
        )


logger = logging.getLogger(__name__)

REPEATS_MAX = 5
"""Maximum number of repeats of the largest candidate; after that the memory of a worker is unknown."""

SETTLED_SHARE = 1 / 16
"""A repeat that adds at most this share of the drift is the last, because the drift covers more than that."""

ROUNDS_OF_GROUP = 3
"""Rounds of all candidates with several ranks: a single rank cannot decide that all are done."""

_KNOBS = (
    "lower encode.admission.max_tokens or media.image_pixels_max, raise encode.memory_limit, or say with "
    "encode.reserved how much to keep"
)


def reserve_encoder(
    plugin: WorkerPlugin,
    worker: EncodeWorker,
    info: ModelInfo,
    role: EncodeRole,
    *,
    rank: int = 0,
    collect: Callable[[], object] = gc.collect,
) -> tuple[RankMemory, Reservation]:
    """Run the largest batch, or allocate the configured reservation; return the memory before, and the reservation.

    A caching allocator keeps the memory from now on; the reservation says whether it did.

    Raises:
        DeviceOutOfMemory: When there is not enough memory.
    """
    # First, because finding the batches allocates memory, too.
    arena = _batches(plugin, info, role) if role.reserved_bytes is None else None
    memory = worker.device_memory()
    collect()
    memory.release()
    memory.reset_peak()
    loaded, growth = measure_rank(worker, rank), 0
    try:
        if role.reserved_bytes is not None:
            growth = role.reserved_bytes
            _allocate_once(memory, growth)
        elif arena is not None:
            with trial_adapter(worker) as arena.adapter:
                peak = _peak_of(arena, worker, loaded, alone=role.settings.ranks == 1)
            growth = max(0, peak - loaded.reserved_bytes)
            growth += memory.drift(growth)
    except DeviceOutOfMemory as error:
        owner, pool = f"encode rank {rank}", loaded.pool
        others = loaded.total_bytes - loaded.available_bytes - loaded.reserved_bytes
        activations = memory.peak() - loaded.weights_bytes
        lines = [
            LedgerLine(pool, owner, "weights", loaded.weights_bytes),
            LedgerLine(pool, owner, "encoder activations", max(activations, 0)),
            LedgerLine(pool, "others", "peers", max(others, 0)),
        ]
        ledger = Ledger.balanced({pool: loaded.total_bytes}, lines)
        raise DeviceOutOfMemory(f"{error} Memory of {ledger.summary()}.") from error
    memory.settle()
    held = memory.reserved() - loaded.reserved_bytes >= growth > 0
    return loaded, Reservation(
        rank=rank,
        pool=memory.pool,
        growth_bytes=growth,
        held=held,
        pauses=worker.pauses,
        measured=role.reserved_bytes is None,
    )


def _batches(plugin: WorkerPlugin, info: ModelInfo, role: EncodeRole) -> BatchArena | None:
    """Return the candidates with their arrays; None without candidates."""
    if role.pixels_max < 1:
        return None
    batches = plugin.worst_batches(
        info, items=role.items, tokens=role.tokens, pixels_max=role.pixels_max
    )
    if batches is None:
        logger.warning(
            "the plug-in %r does not know its worst batch of images: nothing is reserved for the encoder. "
            "Remedy: say with encode.reserved how much to keep.",
            role.plugin,
        )
    return BatchArena(info, batches, plugin.sample_arrays) if batches else None


def _allocate_once(memory: DeviceMemory, size: int) -> None:
    """Allocate memory once, so that a caching allocator keeps it."""
    try:
        with memory.hold(size):
            pass
    except DeviceOutOfMemory as error:
        raise DeviceOutOfMemory.of_limit(
            "encode.reserved: the memory is not there (bytes)",
            value=size,
            limit=memory.available(),
            remedy="lower it, or raise encode.memory_limit",
        ) from error


def _peak_of(arena: BatchArena, worker: EncodeWorker, loaded: RankMemory, *, alone: bool) -> int:
    """Run the candidates until their memory is known, and return the peak."""
    memory = worker.device_memory()
    memory.reset_peak()
    peak, largest = 0, arena.batches[0]
    for _ in range(1 if alone else ROUNDS_OF_GROUP):
        for batch in arena.batches:
            before, peak = peak, _encode_batch(worker, arena, batch)
            if peak > before:
                largest = batch
    if not alone:
        return peak
    for _ in range(REPEATS_MAX):
        before, peak = peak, _encode_batch(worker, arena, largest)
        if peak - before <= SETTLED_SHARE * memory.drift(max(0, peak - loaded.reserved_bytes)):
            return peak
    logger.warning(
        "the encoder needed more memory each of %d times that its largest batch ran again. Remedy: say with "
        "encode.reserved how much to keep.",
        REPEATS_MAX,
    )
    return peak


class BatchArena:
    """Arrays and pages for each of the batches, in shared mappings; images of one plan use the same.

    `sample` returns arrays of an image, for encoders that need other values than zeros.
    """

    def __init__(
        self,
        info: ModelInfo,
        batches: Sequence[Sequence[ImagePlan]],
        sample: Callable[[ModelInfo, ImagePlan], Arrays] | None = None,
    ) -> None:
        self.batches = batches
        plans = dict.fromkeys(plan for batch in batches for plan in batch)
        pages = max(-(-plan.tokens // _PAGE_ROWS) for plan in plans)
        largest = _shared(max(extent_bytes(plan.arrays) for plan in plans))
        self._views: dict[ImagePlan, Arrays] = {}
        for plan in plans:
            arrays = sample(info, plan) if sample is not None else {}
            extent = _shared(extent_bytes(plan.arrays)) if arrays else largest
            self._views[plan] = view_arrays(plan.arrays, extent)
            for name, values in arrays.items():
                self._views[plan][name][...] = values
        rows = _shared(pages * _PAGE_ROWS * info.embedding_row_bytes)
        self.embeddings = rows.reshape(pages, _PAGE_ROWS, -1)
        self.adapter = 0

    def jobs(self, batch: Sequence[ImagePlan]) -> list[EncodeJob]:
        """Return the jobs of a batch."""
        return [
            EncodeJob(
                b"",
                plan.tokens,
                self._views[plan],
                plan.metadata,
                range(-(-plan.tokens // _PAGE_ROWS)),
                self.adapter,
            )
            for plan in batch
        ]


def _encode_batch(worker: EncodeWorker, arena: BatchArena, batch: Sequence[ImagePlan]) -> int:
    """Encode one batch, and return the peak so far."""
    memory = worker.device_memory()
    try:
        doing = memory_errors("encoding the worst batch of images", remedy=_KNOBS)
        with doing, worker.sparsely():
            worker.encode(arena.jobs(batch), arena.embeddings)
    except DeviceOutOfMemory as error:
        largest = max(batch, key=lambda plan: plan.tokens)
        raise DeviceOutOfMemory.of_limit(
            f"the worst batch of images does not fit on {memory.name} (bytes): {len(batch)} images with "
            f"{sum(plan.tokens for plan in batch)} tokens, the largest with {largest.tokens} of "
            + " and ".join(f"{spec.name} {list(spec.shape)}" for spec in largest.arrays),
            value=f"more than {memory.peak()}",
            limit=memory.total(),
            remedy=_KNOBS,
        ) from error
    return memory.peak()


def _shared(size: int) -> npt.NDArray[np.uint8]:
    """Return zeros in a separate shared mapping, with all pages written, like the arena."""
    array = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    array.fill(0)
    return array
