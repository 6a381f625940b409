"""Adding LoRA adapters to a module and removing them while it runs, and passes over rows of different adapters.

The base product is computed once for all rows; the contribution of each adapter is computed for its rows alone.
`places.py` maps the layers of an adapter to products. Without adapters the module is unchanged, at no cost.

Rejected: merging into the weights, which serves one adapter at a time; wrapper modules, which change names and break
code that reads `layer.weight`; one padded tensor for all adapters, in which each row pays for the highest rank.

The rows of a pass are set before it. A layer that is called with another number of rows fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from vsched.errors import CheckpointError
from vsched.worker.contract import Batch
from vsched_workers.adapters.files import Adapter, LowRankPair, read_adapter
from vsched_workers.adapters.places import (
    BASE_MODEL,
    AdapterPass,
    AdapterRoom,
    Carrier,
    LayerPlace,
    MakeSums,
    Part,
    PassRows,
    Places,
    Room,
    RowsOfOne,
    TorchSums,
    bytes_of_one,
    module_places,
    own_memory,
    zero_parts,
)
from vsched_workers.parallel.slicing import Cut

Name = str | int


class AdaptedModule:
    """A module with LoRA adapters, which are added and removed between passes, by a name or a number other than 0.

    Args:
        module: Its linear layers are called as modules, except for those that fused layers replace.
        layers: The module as it runs; fused layers have their own targets of adapters, and set the rows of each call.
        cuts: This rank's part of each shared weight, by the weights' names.
        only: The layers that can have adapters; None for all.
        prefixes: Prefixes that an adapter may use for the names of its layers, such as `model.`.
        others: Prefixes of layers that belong to another module, such as the tower; they are skipped.
        count_max: The maximum number of adapters.
        rank_max: Their maximum rank.
        allocate: Allocates the memory for adapters, zeroed.
        make_sums: Factory of the adapter parts of one product.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        layers: object = None,
        cuts: Mapping[str, Cut] | None = None,
        only: Collection[str] | None = None,
        prefixes: Sequence[str] = ("",),
        others: Sequence[str] = (),
        count_max: int,
        rank_max: int,
        allocate: Room = own_memory,
        make_sums: MakeSums = TorchSums,
    ) -> None:
        """Take a module, without changing it yet."""
        self._module = module
        fused: Any = layers if hasattr(layers, "adapter_places") else None
        if fused is None:
            places, self._pass = module_places(module, cuts or {}), AdapterPass()
        else:
            places, self._pass = fused.adapter_places("", cuts or {}), fused.passes
        self._places: Places = {n: each for n, each in places.items() if only is None or n in only}
        self._prefixes, self._others = tuple(prefixes), tuple(others)
        self._count_max, self._rank_max = count_max, rank_max
        each = bytes_of_one(self._places, make_sums, rank_max=rank_max)
        self._room = AdapterRoom(each, count_max, allocate)
        self._make_sums = make_sums
        self._joined: dict[Carrier, TorchSums] = {}
        self._numbers: dict[Name | None, int] = {None: BASE_MODEL, 0: BASE_MODEL}

    @property
    def bytes(self) -> int:
        """Bytes on the device that were allocated for all adapters."""
        return self._room.bytes

    @property
    def names(self) -> list[Name]:
        """The adapters that were added."""
        return [name for name in self._numbers if name]

    def read_adapter(self, name: Name, path: str) -> None:
        """Read an adapter and add its layers of this module, all or none.

        Raises:
            CheckpointError: When it cannot be read, or does not fit.
        """
        adapter = read_adapter(Path(path), rank_max=self._rank_max)
        output = getattr(self._module, "get_output_embeddings", lambda: None)()
        named = self._module.named_modules() if output is not None else ()
        # A decoder alone is without its head.
        head = next((name for name, each in named if each is output), "lm_head")
        if any(name.endswith(head) for name in adapter.pairs):
            raise CheckpointError(
                f"the adapter changes {head}, the output projection, which is not served. "
                "Remedy: use an adapter of the layers alone, or merge this one into its base model."
            )
        self.add_adapter(name, adapter)

    def add_adapter(self, name: Name, adapter: Adapter) -> None:
        """Add the layers of an adapter that belong to this module, or none if one does not fit.

        Raises:
            CheckpointError: When there are too many adapters, or one of that name, or it does not fit this module.
        """
        self._check_count(name)
        parts: dict[Carrier, list[Part]] = {}
        for module, pair in adapter.pairs.items():
            for place in self._find(module, pair):
                own = parts.setdefault(place.carrier, [])
                own.append(place.part(pair.down, pair.up, pair.scaling))
        self._put_adapter(name, parts)

    def add_trial(self, name: Name) -> None:
        """Add an adapter of the highest rank to all layers, with zero weights."""
        self._check_count(name)
        self._put_adapter(name, zero_parts(self._places, self._rank_max))

    def _check_count(self, name: Name) -> None:
        if name in self._numbers:
            raise CheckpointError(
                f"there is an adapter {name!r}. Remedy: remove it, or use another name."
            )
        if len(self.names) >= self._count_max:
            raise CheckpointError.of_limit(
                "adapters",
                value=len(self.names) + 1,
                limit=self._count_max,
                remedy="remove one, or raise the limit",
            )

    def _put_adapter(self, name: Name, parts: Mapping[Carrier, Sequence[Part]]) -> None:
        number = min({*range(self._count_max)} - {*self._numbers.values()})
        room = self._room.room_of(number)
        # Copy all parts before any is installed: the device's memory may run out.
        placed = {
            carrier: self._join_carrier(carrier).place_parts(own, room)
            for carrier, own in parts.items()
        }
        self._numbers[name] = number
        for carrier, kept in placed.items():
            carrier.put_parts(number, kept)

    def remove_adapter(self, name: Name) -> None:
        """Remove an adapter, if it is there; layers without adapters are unchanged again."""
        number = self._numbers.pop(name, BASE_MODEL)
        for carrier in self._joined:
            carrier.drop_parts(number)

    def rows_of(self, batch: Batch) -> AbstractContextManager[None]:
        """Apply adapters to the rows of a step, first decode rows, then chunks, until the context ends."""
        adapters = [each.adapter for each in batch.decode_sequences]
        for chunk in batch.chunks:
            adapters += [chunk.sequence.adapter] * (chunk.stop - chunk.start)
        return self.rows(adapters) if any(adapters) else nullcontext()

    @contextmanager
    def rows(self, names: Sequence[Name | None]) -> Iterator[None]:
        """Run passes with these adapters per row, 0 or None for the base model, until the context ends."""
        numbers = self._numbers
        missing = {*names} - numbers.keys()
        assert not missing, f"no adapter {sorted(map(str, missing))}"
        owners = np.array([numbers[name] for name in names], dtype=np.int64)
        if owners.max(initial=BASE_MODEL) == BASE_MODEL:
            yield
            return
        rows = PassRows(owners)
        self._pass.rows, self._pass.call = rows, rows.all
        try:
            yield
        finally:
            self._pass.rows = self._pass.call = None

    @contextmanager
    def all_rows(self, name: Name | None) -> Iterator[None]:
        """Run passes with this adapter for all rows, for any number of rows per call."""
        if not name:
            yield
            return
        assert name in self._numbers, f"no adapter {name}"
        self._pass.call = RowsOfOne(self._numbers[name])
        try:
            yield
        finally:
            self._pass.call = None

    def _join_carrier(self, carrier: Carrier) -> TorchSums:
        """Return the adapter parts of a carrier; attach it to this module's passes the first time."""
        if carrier not in self._joined:
            self._joined[carrier] = self._make_sums(carrier.dtype, carrier.device)
            carrier.join(self._pass, self._joined[carrier])
        return self._joined[carrier]

    def _find(self, module: str, pair: LowRankPair) -> Sequence[LayerPlace]:
        """Return the places of a layer in an adapter; none if it belongs to another module."""
        for prefix in self._prefixes:
            own = module.removeprefix(prefix)
            places = self._places.get(own) if module.startswith(prefix) else None
            if places is not None:
                wanted = [places[0].inputs, places[0].outputs]
                given = [pair.down.shape[1], len(pair.up)]
                if given != wanted:
                    raise CheckpointError(
                        f"the adapter's {module} has {given} inputs and outputs, and the model's {wanted}. "
                        "Remedy: use an adapter that was trained on this model."
                    )
                return places
        if self._is_others(module):
            return ()
        raise self._refusal(module)

    def _is_others(self, module: str) -> bool:
        """Return whether a layer belongs to another module: by the longest prefix, or because it was removed here."""

        def longest(prefixes: Sequence[str]) -> int:
            return max((len(each) for each in prefixes if module.startswith(each)), default=-1)

        if longest(self._others) > longest(self._prefixes):
            return True
        for prefix in self._prefixes:
            found: nn.Module | None = self._module
            for name in module.removeprefix(prefix).split("."):
                found = getattr(found, "_modules", {}).get(name)
                if isinstance(found, nn.Identity):
                    return True
        return False

    def _refusal(self, module: str) -> CheckpointError:
        for prefix in self._prefixes:
            try:
                found = self._module.get_submodule(module.removeprefix(prefix))
            except AttributeError:
                continue
            return CheckpointError(
                f"the adapter changes {module}, a {type(found).__name__} here; only linear layers of all tokens of a "
                "step are supported. Remedy: use an adapter without it, or merge this one into its base model."
            )
        return CheckpointError(
            f"the adapter changes {module}, which the model lacks. "
            "Remedy: use an adapter that was trained on this model."
        )
