"""Measures the memory of the largest batch of images, before anything else allocates memory.

The plug-in names candidates for this batch. They are really computed, with arrays and pages of their own. Like the
arena, these are in shared mappings that exist before the measurement, so they are not counted.

The same batch may need more memory when it runs again, because kept allocations of the first run (compiled code,
caches, small objects) fragment the memory. So the candidate with the highest peak is repeated until it adds almost
nothing. Additional memory of batches with other shapes, because of fragmentation, is the `drift` of the device memory.
"""

from __future__ import annotations

import gc
import logging
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vsched.errors import DeviceOutOfMemory, limit_message
from vsched.memory import Ledger, LedgerLine
from vsched.policy import RankMemory, Reservation
from vsched.types import ModelInfo
from vsched.worker.contract import (
    Arrays,
    EncodeJob,
    EncodeWorker,
    ImagePlan,
    WorkerPlugin,
    extent_bytes,
    view_arrays,
)
from vsched.worker.memory import DeviceMemory, memory_errors
from vsched.worker.profiling_run import measure_rank, trial_adapter
from vsched.worker.spec import EncodeRole

logger = logging.getLogger(__name__)

_PAGE_ROWS = 64

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
    arena = None if role.reserved_bytes is not None else _batches(plugin, info, role)
    memory = worker.device_memory()
    collect()
    memory.release()
    memory.reset_peak()
    loaded = measure_rank(worker, rank)
    try:
        if role.reserved_bytes is not None:
            _take(memory, role.reserved_bytes)
            growth = role.reserved_bytes
        else:
            with trial_adapter(worker) as adapter:
                growth = _measure(worker, arena, loaded, role, adapter)
    except DeviceOutOfMemory as error:
        summary = _ledger(loaded, memory.peak()).summary()
        raise DeviceOutOfMemory(f"{error} Memory of {summary}.") from error
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


def _ledger(loaded: RankMemory, peak_bytes: int) -> Ledger:
    """Return the ledger at the time of an out-of-memory error."""
    owner, pool = f"encode rank {loaded.rank}", loaded.pool
    others = loaded.total_bytes - loaded.available_bytes - loaded.reserved_bytes
    lines = [
        LedgerLine(pool, owner, "weights", loaded.weights_bytes),
        LedgerLine(pool, owner, "encoder activations", max(peak_bytes - loaded.weights_bytes, 0)),
        LedgerLine(pool, "others", "peers", max(others, 0)),
    ]
    return Ledger.balanced({pool: loaded.total_bytes}, lines)


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


def _take(memory: DeviceMemory, size: int) -> None:
    """Allocate memory once, so that a caching allocator keeps it."""
    try:
        with memory.hold(size):
            pass
    except DeviceOutOfMemory as error:
        raise DeviceOutOfMemory(
            limit_message(
                "encode.reserved: the memory is not there (bytes)",
                value=size,
                limit=memory.available(),
                remedy="lower it, or raise encode.memory_limit",
            )
        ) from error


def _measure(
    worker: EncodeWorker,
    arena: BatchArena | None,
    loaded: RankMemory,
    role: EncodeRole,
    adapter: int,
) -> int:
    """Run the candidates until their memory is known; return it, 0 without candidates.

    Raises:
        DeviceOutOfMemory: When one does not fit.
    """
    if arena is None:
        return 0
    arena.adapter = adapter
    memory = worker.device_memory()
    memory.reset_peak()
    alone, peak, largest = role.settings.ranks == 1, 0, arena.batches[0]
    for _ in range(1 if alone else ROUNDS_OF_GROUP):
        for batch in arena.batches:
            before = peak
            _run(worker, arena, batch)
            peak = memory.peak()
            if peak > before:
                largest = batch
    if alone:
        peak = _repeat(worker, arena, largest, loaded)
    growth = max(0, peak - loaded.reserved_bytes)
    return growth + memory.drift(growth)


def _repeat(
    worker: EncodeWorker, arena: BatchArena, batch: Sequence[ImagePlan], loaded: RankMemory
) -> int:
    """Repeat a batch until it adds almost nothing; return the peak."""
    memory = worker.device_memory()
    peak = memory.peak()
    for _ in range(REPEATS_MAX):
        before = peak
        _run(worker, arena, batch)
        peak = memory.peak()
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


def _run(worker: EncodeWorker, arena: BatchArena, batch: Sequence[ImagePlan]) -> None:
    """Encode one batch.

    Raises:
        DeviceOutOfMemory: When it does not fit; the message has the remedy.
    """
    memory = worker.device_memory()
    try:
        doing = memory_errors("encoding the worst batch of images", remedy=_KNOBS)
        with doing, worker.sparsely():
            worker.encode(arena.jobs(batch), arena.embeddings)
    except DeviceOutOfMemory as error:
        largest = max(batch, key=lambda plan: plan.tokens)
        raise DeviceOutOfMemory(
            limit_message(
                f"the worst batch of images does not fit on {memory.name} (bytes): {len(batch)} images with "
                f"{sum(plan.tokens for plan in batch)} tokens, the largest with {largest.tokens} of "
                + " and ".join(f"{spec.name} {list(spec.shape)}" for spec in largest.arrays),
                value=f"more than {memory.peak()}",
                limit=memory.total(),
                remedy=_KNOBS,
            )
        ) from error


def _shared(size: int) -> npt.NDArray[np.uint8]:
    """Return zeros in a separate shared mapping, with all pages written, like the arena."""
    array = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    array.fill(0)
    return array
