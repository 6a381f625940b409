"""The adapters of a worker, by number: read, put into memory taken for them, and applied to the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from vsched.errors import CheckpointError, ConfigError
from vsched.worker.contract import Batch, WorkerSettings
from vsched_workers.adapters.files import Adapter, read_adapter
from vsched_workers.adapters.layers import AdaptedModule
from vsched_workers.adapters.room import AdapterRoom, layer_sizes


class ServedAdapters:
    """The adapters of one module.

    Args:
        module: Its linear layers are called, not read.
        prefixes: What the names of its layers may have before them in an adapter.
        others: The same for what the other stage has: it is left out here.
        head: The output projection, where it is within: it sees other rows than the layers, and has no adapter.
        count: How many there may be.
        rank_max: Of which rank.
        allocate: Returns zeros of a shape and dtype on the device.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        prefixes: Sequence[str],
        others: Sequence[str] = (),
        head: nn.Module | None = None,
        count: int,
        rank_max: int,
        dtype: torch.dtype,
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> None:
        """Take the memory for all of them."""
        self._module = AdaptedModule(module, prefixes=prefixes, count_max=count)
        self._prefixes = tuple(prefixes)
        self._others = tuple(others)
        self._head = next((name for name, each in module.named_modules() if each is head), "")
        self._rank_max = rank_max
        sizes = layer_sizes(module, without=head)
        self._room = AdapterRoom(
            sizes, count=count, rank_max=rank_max, dtype=dtype, allocate=allocate
        )
        self._empty: set[int] = set()
        """Those that change nothing here."""

    @property
    def bytes(self) -> int:
        """Bytes that were taken for all of them."""
        return self._room.bytes

    def add(self, number: int, path: str) -> None:
        """Read an adapter and add what it changes here, all of it or nothing.

        Raises:
            CheckpointError: When it cannot be read, or does not fit.
        """
        adapter = self._own(read_adapter(Path(path), rank_max=self._rank_max))
        if not adapter.pairs:
            self._empty.add(number)
            return
        self._module.check(adapter)
        self._module.add(str(number), self._room.put(number, adapter))

    def add_trial(self, number: int) -> None:
        """Add one of the highest rank to all layers."""
        trial = self._room.put_trial(number, lambda name: self._prefixes[0] + name)
        self._module.add(str(number), trial)

    def remove(self, number: int) -> None:
        """Take an adapter away, if it is there."""
        if number in self._empty:
            self._empty.discard(number)
        elif str(number) in self._module.bytes_by_adapter:
            self._module.remove(str(number))
            self._room.free(number)

    def rows_of(self, batch: Batch) -> AbstractContextManager[None]:
        """Apply adapters to the rows of a step until the context ends: those that decode, then those of chunks."""
        adapters = [each.adapter for each in batch.decode_sequences]
        for chunk in batch.chunks:
            adapters += [chunk.sequence.adapter] * (chunk.stop - chunk.start)
        if not any(adapters):
            return nullcontext()
        names = {each: str(each) for each in set(adapters) if each and each not in self._empty}
        return self._module.rows([names.get(each) for each in adapters])

    def _own(self, adapter: Adapter) -> Adapter:
        """Leave out what the other stage has; refuse the head, which does not see the rows of a step."""
        if self._head and any(name.endswith(self._head) for name in adapter.pairs):
            raise CheckpointError(
                f"the adapter changes {self._head}, the output projection, which is not served. "
                "Remedy: use an adapter of the layers alone, or merge this one into its base model."
            )
        others = self._others
        return Adapter(
            {name: pair for name, pair in adapter.pairs.items() if not name.startswith(others)}
            if others
            else adapter.pairs
        )


class AdaptedWorker:
    """What a worker has to do with adapters; see `vsched.worker.capabilities.ServesAdapters`."""

    def __init__(self, adapters: ServedAdapters | None) -> None:
        """Take the adapters that requests may name; None where they may name none."""
        self._served = adapters

    @property
    def adapter_bytes(self) -> int:
        """Bytes that were taken for adapters."""
        return 0 if self._served is None else self._served.bytes

    def add_adapter(self, number: int, path: str) -> None:
        """Add an adapter, all of it or nothing.

        Raises:
            CheckpointError: When it cannot be read, or does not fit.
        """
        self._adapters.add(number, path)

    def add_trial_adapter(self, number: int) -> None:
        """Add one of the highest rank to all layers."""
        self._adapters.add_trial(number)

    def remove_adapter(self, number: int) -> None:
        """Take an adapter away, if it is there."""
        self._adapters.remove(number)

    def adapted(self, batch: Batch) -> AbstractContextManager[None]:
        """Apply adapters to the rows of a step until the context ends."""
        return nullcontext() if self._served is None else self._served.rows_of(batch)

    @property
    def _adapters(self) -> ServedAdapters:
        assert self._served is not None, "settings ask for adapters before any comes"
        return self._served


def served_adapters(
    module: nn.Module,
    settings: WorkerSettings,
    dtype: torch.dtype,
    allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    *,
    takes: bool,
    prefixes: Sequence[str],
    others: Sequence[str],
) -> ServedAdapters | None:
    """Take memory for as many adapters as a language model may have at a time; None for none.

    Raises:
        ConfigError: When it takes none, as it runs here.
    """
    if not settings.adapters:
        return None
    if settings.ranks > 1:
        raise ConfigError(
            "adapters.count_max: ranks that share a model take no adapters yet. "
            "Remedy: set it to 0, or generate.tensor_parallel to 1."
        )
    if not takes:
        raise ConfigError(
            "adapters.count_max: fused or packed layers take no adapters yet, as those of this model in "
            f"{dtype} on {settings.device}. Remedy: set it to 0, or model.dtype to float32 on a CPU."
        )
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return ServedAdapters(
        module,
        prefixes=prefixes,
        others=others,
        head=head,
        count=settings.adapters,
        rank_max=settings.adapter_rank_max,
        dtype=dtype,
        allocate=allocate,
    )
