"""Adding LoRA adapters to a module and removing them while it runs, and passes over rows of different adapters.

The base product is computed once for all rows; the contribution of each adapter is computed for its rows alone
(`sums.py`). `places.py` maps the layers of an adapter to products. Without adapters the module is unchanged, at no
cost.

The rows of a pass are set before it. A layer that is called with another number of rows fails, and so does a pass that
skips a layer: a partly applied adapter behaves like no model that was ever trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from torch import nn

from vsched.errors import CheckpointError, limit_message
from vsched_workers.adapters.files import Adapter, LowRankPair
from vsched_workers.adapters.places import Carrier, LayerPlace, Places, module_places
from vsched_workers.adapters.room import (
    AdapterRoom,
    Allocate,
    bytes_of_one,
    own_memory,
    zero_parts,
)
from vsched_workers.adapters.rows import NOBODY, AdapterPass, PassRows, RowsOfOne
from vsched_workers.adapters.sums import MakeSums, Part, Room, Sums, TorchSums


class AdaptedModule:
    """A module with LoRA adapters, which are added and removed between passes.

    Args:
        module: Its linear layers are called as modules, except for those in `places`.
        places: Targets of adapters by the names of layers; its linear layers by default.
        prefixes: Prefixes that an adapter may use for the names of its layers, such as `model.`.
        others: Prefixes of layers that belong to another module, such as the tower; they are skipped.
        count_max: The maximum number of adapters.
        rank_max: Their maximum rank; 0 to allocate memory for each adapter separately, on the host.
        allocate: Allocates the memory for adapters.
        make_sums: Factory of the adapter parts of one product.
        passes: The source of a pass's rows for products; shared with code that sets the rows of each call.

    Attributes:
        whole: Whether passes call all layers, as they do except while memory is measured.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        places: Places | None = None,
        prefixes: Sequence[str] = ("",),
        others: Sequence[str] = (),
        count_max: int,
        rank_max: int = 0,
        allocate: Allocate = own_memory,
        make_sums: MakeSums = TorchSums,
        passes: AdapterPass | None = None,
    ) -> None:
        """Take a module, without changing it yet."""
        self.whole = True
        self._module = module
        self._places = module_places(module, {}) if places is None else places
        self._prefixes, self._others = tuple(prefixes), tuple(others)
        self._count_max, self._rank_max = count_max, rank_max
        self._room: AdapterRoom | None = None
        if rank_max:
            each = bytes_of_one(self._places, make_sums, rank_max=rank_max)
            self._room = AdapterRoom(each, count_max, allocate)
        self._make_sums = make_sums
        self._pass = passes or AdapterPass()
        self._joined: dict[Carrier, Sums] = {}
        self._numbers: dict[str | None, int] = {None: NOBODY}
        self._bytes: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes on the device that were allocated for all adapters."""
        return 0 if self._room is None else self._room.bytes

    @property
    def bytes_by_adapter(self) -> Mapping[str, int]:
        """Bytes on the device that each adapter uses here."""
        return dict(self._bytes)

    def add(self, name: str, adapter: Adapter) -> None:
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
        self._put(name, parts)

    def add_trial(self, name: str) -> None:
        """Add an adapter of the highest rank to all layers, with zero weights."""
        self._check_count(name)
        self._put(name, zero_parts(self._places, self._rank_max))

    def _check_count(self, name: str) -> None:
        if name in self._bytes:
            raise CheckpointError(
                f"there is an adapter {name!r}. Remedy: remove it, or use another name."
            )
        if len(self._bytes) >= self._count_max:
            raise CheckpointError(
                limit_message(
                    "adapters",
                    value=len(self._bytes) + 1,
                    limit=self._count_max,
                    remedy="remove one, or raise the limit",
                )
            )

    def _put(self, name: str, parts: Mapping[Carrier, Sequence[Part]]) -> None:
        number = min({*range(self._count_max)} - {*self._numbers.values()})
        room: Room = own_memory if self._room is None else self._room.place(number)
        # Copy all parts before any is installed: the device's memory may run out.
        placed = {carrier: self._join(carrier).place(own, room) for carrier, own in parts.items()}
        self._numbers[name] = number
        for carrier, kept in placed.items():
            carrier.put(number, kept)
        self._bytes[name] = sum(
            each.down.nbytes + each.up.nbytes for kept in placed.values() for each in kept
        )

    def remove(self, name: str) -> None:
        """Remove an adapter; layers without adapters are unchanged again."""
        del self._bytes[name]
        number = self._numbers.pop(name)
        for carrier in self._joined:
            carrier.drop(number)

    @contextmanager
    def rows(self, names: Sequence[str | None]) -> Iterator[None]:
        """Run passes with these adapters per row, None for the base model, until the context ends."""
        numbers = self._numbers
        missing = {*names} - numbers.keys()
        assert not missing, f"no adapter {sorted(map(str, missing))}"
        owners = np.array([numbers[name] for name in names], dtype=np.int64)
        if owners.max(initial=NOBODY) == NOBODY:
            yield
            return
        rows = PassRows(owners)
        with self._passing({*owners.tolist()}):
            self._pass.rows, self._pass.call = rows, rows.all
            yield

    @contextmanager
    def all_rows(self, name: str | None) -> Iterator[None]:
        """Run passes with this adapter for all rows, for any number of rows per call."""
        if name is None:
            yield
            return
        assert name in self._numbers, f"no adapter {name}"
        number = self._numbers[name]
        with self._passing({number}):
            self._pass.call = RowsOfOne(number)
            yield

    @contextmanager
    def _passing(self, owners: set[int]) -> Iterator[None]:
        for carrier in self._joined:
            carrier.called = False
        try:
            yield
            unused = [each for each in self._joined if each.waits_for(owners)]
            assert not (self.whole and unused), (
                f"layers with adapters were not called: {self._names(unused)[:3]}"
            )
        finally:
            self._pass.rows = self._pass.call = None

    def _names(self, carriers: Sequence[Carrier]) -> list[str]:
        return [
            name
            for name, places in self._places.items()
            if any(place.carrier in carriers for place in places)
        ]

    def _join(self, carrier: Carrier) -> Sums:
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
