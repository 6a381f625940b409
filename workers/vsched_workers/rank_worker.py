"""The common part of both workers of a rank: device, threads, process group and adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from vsched.types import ModelInfo
from vsched.worker.contract import Batch, Worker
from vsched.worker.memory import DeviceMemory
from vsched_workers.adapters.layers import AdaptedModule
from vsched_workers.backends.choice import threads_here
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.parallel.rank_group import RankGroup


def served_adapters(adapt: Callable[..., AdaptedModule], backend: Backend) -> AdaptedModule | None:
    """Allocate memory for the configured number of adapters; return None, without preparation, if it is 0."""
    settings = backend.settings
    if not settings.adapters:
        return None
    return adapt(
        count_max=settings.adapters,
        rank_max=settings.adapter_rank_max,
        allocate=functools.partial(backend.zeros, touch=True),
        make_sums=backend.prepare_adapters(),
    )


class RankWorker(Worker):
    """A worker with a backend, in a process group."""

    def __init__(
        self,
        info: ModelInfo,
        backend: Backend,
        group: RankGroup,
        adapters: AdaptedModule | None,
        *,
        weights_bytes: int,
    ) -> None:
        """Take the adapters that requests may name; None without adapters."""
        self.weights_bytes = weights_bytes
        self.adapter_bytes = 0 if adapters is None else adapters.bytes
        self._info = info
        self._backend = backend
        self._group = group
        self._memory = group.memory(backend.memory)
        self._served = adapters

    def device_memory(self) -> DeviceMemory:
        """Return the memory of the device that the worker runs on."""
        return self._memory

    def kernels_here(self) -> Mapping[str, int]:
        """Return the compiled kernels of this process."""
        return self._backend.kernels_here()

    def threads_here(self) -> int:
        """Return the number of threads that this process computes with at present."""
        return threads_here(self._backend)

    def abort(self) -> None:
        """Fail the collectives of the group, because of a failure outside of this worker."""
        self._group.abort()

    def add_adapter(self, number: int, path: str) -> None:
        """Add an adapter, all of it or nothing.

        Raises:
            CheckpointError: When it cannot be read, or does not fit.
        """
        self._adapters.read(number, path)

    def add_trial_adapter(self, number: int) -> None:
        """Add an adapter of the highest rank to all layers."""
        self._adapters.add_trial(number)

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter, if it is there."""
        self._adapters.remove(number)

    def adapted(self, batch: Batch) -> AbstractContextManager[None]:
        """Apply adapters to the rows of a step until the context ends."""
        return nullcontext() if self._served is None else self._served.rows_of(batch)

    def adapted_images(self, number: int) -> AbstractContextManager[None]:
        """Apply an adapter to all rows of images until the context ends; none for 0."""
        return nullcontext() if self._served is None else self._served.all_rows(number)

    @contextmanager
    def partly_adapted(self) -> Iterator[None]:
        """Allow steps through some layers only until the context ends."""
        if self._served is None:
            yield
            return
        self._served.whole = False
        try:
            yield
        finally:
            self._served.whole = True

    @property
    def _adapters(self) -> AdaptedModule:
        assert self._served is not None, "settings ask for adapters before any comes"
        return self._served
