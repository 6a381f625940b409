"""Finds out what the worst batch of images needs, before anything else takes the memory.

The batches are those that the plug-in names as candidates. They run for real, over arrays and pages of their own. These
lie in shared mappings that are there before the measurement begins, as the arena is: they count neither to the process
nor to what is measured.

The same batch may need more memory when it runs again, since what was kept of the first time (compiled code, caches,
small objects) lies between the pieces of the second. So the one that took the most runs again until it adds next to
nothing. What batches of other shapes may need beyond that, because of where their pieces happen to lie, is the memory's
`drift`.
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
from vsched.worker.capabilities import (
    SampleImages,
    WorstCaseBuilder,
    adapter_bytes,
    can_pause,
    encoding_sparsely,
    trial_adapter,
)
from vsched.worker.contract import (
    Arrays,
    EncodeJob,
    EncodeWorker,
    ImagePlan,
    WorkerPlugin,
    extent_bytes,
    view_arrays,
)
from vsched.worker.memory import DeviceMemory, measure_rank, memory_errors
from vsched.worker.spec import EncodeRole

logger = logging.getLogger(__name__)

_PAGE_ROWS = 64

REPEATS_MAX = 5
"""Repeats of the largest candidate at most; the memory of a worker that needs more each time is not known then."""

SETTLED_SHARE = 1 / 16
"""A repeat that adds at most this share of the drift is the last: that much is there for more than this."""

ROUNDS_OF_GROUP = 3
"""Rounds of all candidates where several ranks encode together: a rank alone cannot tell that they are done."""

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
    """Run the worst batch, or take what the operator reserves; return what was held before, and what came on top.

    Where the allocator caches, it keeps the memory from now on; the reservation says whether it did.

    Raises:
        DeviceOutOfMemory: When the memory is not there.
    """
    # First, for what finds the batches takes memory itself.
    arena = None if role.reserved_bytes is not None else _batches(plugin, info, role)
    memory = worker.device_memory()
    collect()
    memory.release()
    memory.reset_peak()
    loaded = measure_rank(
        memory,
        rank=rank,
        weights_bytes=worker.weights_bytes,
        adapter_bytes=adapter_bytes(worker),
    )
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
        pauses=can_pause(worker),
        measured=role.reserved_bytes is None,
    )


def _ledger(loaded: RankMemory, peak_bytes: int) -> Ledger:
    """Return where the memory was when it ran out."""
    owner, pool = f"encode rank {loaded.rank}", loaded.pool
    others = loaded.total_bytes - loaded.available_bytes - loaded.reserved_bytes
    lines = [
        LedgerLine(pool, owner, "weights", loaded.weights_bytes),
        LedgerLine(pool, owner, "encoder activations", max(peak_bytes - loaded.weights_bytes, 0)),
        LedgerLine(pool, "others", "peers", max(others, 0)),
    ]
    return Ledger.balanced({pool: loaded.total_bytes}, lines)


def _batches(plugin: WorkerPlugin, info: ModelInfo, role: EncodeRole) -> BatchArena | None:
    """Return the candidates with their arrays; None where there are none."""
    if role.pixels_max < 1:
        return None
    if not isinstance(plugin, WorstCaseBuilder):
        logger.warning(
            "the plug-in %r does not know its worst batch of images: nothing is reserved for the encoder. "
            "Remedy: say with encode.reserved how much to keep.",
            role.plugin,
        )
        return None
    batches = plugin.worst_batches(
        info, items=role.items, tokens=role.tokens, pixels_max=role.pixels_max
    )
    if not batches:
        return None
    sample = plugin.sample_arrays if isinstance(plugin, SampleImages) else None
    return BatchArena(info, batches, sample)


def _take(memory: DeviceMemory, size: int) -> None:
    """Hold memory once: an allocator that caches keeps it."""
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
    """Run the candidates until their need is known; return it, 0 where there are none.

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
    """Run a batch again until it adds next to nothing; return the peak."""
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
    """Arrays and pages for any of some batches, in shared mappings; images of one plan have the same ones.

    `sample` gives the arrays of an image, where zeros would not do for all.
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
        """Return what encodes a batch."""
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
        DeviceOutOfMemory: When it does not fit; the message names what to change.
    """
    memory = worker.device_memory()
    try:
        doing = memory_errors("encoding the worst batch of images", remedy=_KNOBS)
        with doing, encoding_sparsely(worker):
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
    """Return zeros in a mapping of their own, shared and written, as the arena is."""
    array = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    array.fill(0)
    return array
