"""The adapters of a worker, by number: reading, storing in preallocated memory, and applying to rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vsched.errors import CheckpointError
from vsched.worker.contract import Batch, WorkerSettings
from vsched_workers.adapters.files import read_adapter
from vsched_workers.adapters.layers import AdaptedModule
from vsched_workers.adapters.places import Places, module_places
from vsched_workers.adapters.room import Allocate
from vsched_workers.adapters.rows import AdapterPass
from vsched_workers.adapters.sums import MakeSums
from vsched_workers.parallel.slicing import Cut


@dataclass(frozen=True)
class Adaptable:
    """The interface of a module to LoRA adapters.

    Attributes:
        module: The module that contains the layers.
        places: Targets of adapters by the names of layers.
        passes: The module's object for the rows of each call; None if all calls use all rows.
        prefixes: Prefixes that an adapter may use for the names of its layers.
        others: Prefixes of the names of layers in the other stage, which are left to that.
    """

    module: nn.Module
    places: Places
    passes: AdapterPass | None
    prefixes: Sequence[str]
    others: Sequence[str]


def adaptable_module(
    module: nn.Module,
    *,
    layers: object = None,
    cuts: Mapping[str, Cut] | None = None,
    only: Collection[str] | None = None,
    prefixes: Sequence[str] = ("",),
    others: Sequence[str] = (),
) -> Adaptable:
    """Return the interface of a module to LoRA adapters.

    Args:
        module: As it runs.
        layers: The runnable layers; fused layers have their own places.
        cuts: This rank's part of each shared weight, by the weights' names.
        only: The layers that can have adapters; None for all.
        prefixes: See `Adaptable`.
        others: See `Adaptable`.
    """
    fused: Any = layers if hasattr(layers, "adapter_places") else None
    places: Places = (
        module_places(module, cuts or {}) if fused is None else fused.adapter_places("", cuts or {})
    )
    if only is not None:
        places = {name: each for name, each in places.items() if name in only}
    passes = None if fused is None else fused.passes
    return Adaptable(module, places, passes, prefixes, others)


class ServedAdapters:
    """The adapters of one module, in preallocated memory for the maximum number."""

    def __init__(
        self,
        adaptable: Adaptable,
        settings: WorkerSettings,
        allocate: Allocate,
        make_sums: MakeSums,
    ) -> None:
        """Allocate the memory."""
        module = adaptable.module
        find_head = getattr(module, "get_output_embeddings", lambda: None)
        self._head = next(
            (name for name, each in module.named_modules() if each is find_head()), ""
        )
        self._rank_max = settings.adapter_rank_max
        self._module = AdaptedModule(
            module,
            places=adaptable.places,
            prefixes=adaptable.prefixes,
            others=adaptable.others,
            count_max=settings.adapters,
            rank_max=settings.adapter_rank_max,
            allocate=allocate,
            make_sums=make_sums,
            passes=adaptable.passes,
        )

    @property
    def bytes(self) -> int:
        """Bytes that were allocated for all of them."""
        return self._module.bytes

    def add(self, number: int, path: str) -> None:
        """Read an adapter and add its layers of this module, all or none.

        Raises:
            CheckpointError: When it cannot be read, or does not fit.
        """
        adapter = read_adapter(Path(path), rank_max=self._rank_max)
        if self._head and any(name.endswith(self._head) for name in adapter.pairs):
            raise CheckpointError(
                f"the adapter changes {self._head}, the output projection, which is not served. "
                "Remedy: use an adapter of the layers alone, or merge this one into its base model."
            )
        self._module.add(str(number), adapter)

    def add_trial(self, number: int) -> None:
        """Add an adapter of the highest rank to all layers."""
        self._module.add_trial(str(number))

    def remove(self, number: int) -> None:
        """Remove an adapter, if it is there."""
        if str(number) in self._module.bytes_by_adapter:
            self._module.remove(str(number))

    def rows_of(self, batch: Batch) -> AbstractContextManager[None]:
        """Apply adapters to the rows of a step, first decode rows, then chunks, until the context ends."""
        adapters = [each.adapter for each in batch.decode_sequences]
        for chunk in batch.chunks:
            adapters += [chunk.sequence.adapter] * (chunk.stop - chunk.start)
        if not any(adapters):
            return nullcontext()
        names: Mapping[int, str | None] = {
            each: str(each) if each else None for each in {*adapters}
        }
        return self._module.rows([names[each] for each in adapters])

    def expect_all(self, *, whole: bool) -> None:
        """Set whether steps run all layers, as they do except while memory is measured."""
        self._module.whole = whole

    def all_rows(self, number: int) -> AbstractContextManager[None]:
        """Apply one adapter, or none for 0, to all rows until the context ends."""
        return self._module.all_rows(str(number)) if number else nullcontext()


def served_adapters(
    adaptable: Callable[[], Adaptable],
    settings: WorkerSettings,
    allocate: Allocate,
    prepare: Callable[[], MakeSums],
) -> ServedAdapters | None:
    """Allocate memory for the configured number of adapters; return None, without preparation, if it is 0.

    Args:
        adaptable: Returns the module's interface to adapters.
        settings: Of the worker.
        allocate: Allocates zeros of a shape and dtype on the device.
        prepare: Compiles the kernels for adapters.
    """
    if not settings.adapters:
        return None
    return ServedAdapters(adaptable(), settings, allocate, prepare())
