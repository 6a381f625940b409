"""Applies adapters to the linear layers of a module, for rows of different adapters in one pass.

The base product is computed once for all rows. What each adapter adds is computed for its rows alone, gathered by an
index and added back by it: few large products on a CPU, and the same calls on a GPU. A row has one adapter at most, so
no two additions meet and the sum has one order.

A layer gets a forward hook while an adapter is there for it, and is left as it is otherwise: its name, its weight and
its place in the module stay, and without adapters nothing is paid. Hooks run where a layer is called. Where a path
reads `layer.weight` and multiplies by itself (fused layers), a pass ends with an error, not with half an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vsched.errors import CheckpointError, limit_message
from vsched_workers.adapters.files import Adapter, LowRankPair


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a pass, and which of them each adapter has: int64 indices on the module's device."""

    count: int
    by_adapter: Mapping[str, torch.Tensor]


NO_ROWS = AdapterRows(0, {})


class AdaptedLayer:
    """One linear layer and what adapters add to it, by adapter."""

    def __init__(self, layer: nn.Linear) -> None:
        """Take a layer; it stays as it is until the first adapter is there."""
        self._layer = layer
        self._pairs: dict[str, LowRankPair] = {}
        self._hook: RemovableHandle | None = None
        self.rows = NO_ROWS
        self.called = False

    def waits_for(self, names: Iterable[str]) -> bool:
        """Whether it was not called, though it has a pair of one of these adapters."""
        return not self.called and any(name in self._pairs for name in names)

    def add(self, name: str, pair: LowRankPair) -> None:
        """Take an adapter's pair, which fits, has the layer's dtype and is on its device."""
        self._pairs[name] = pair
        if self._hook is None:
            self._hook = self._layer.register_forward_hook(self._forward)

    def remove(self, name: str) -> None:
        """Forget an adapter's pair, if there is one."""
        self._pairs.pop(name, None)
        if not self._pairs and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _forward(self, _layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Add to the outputs [..., outputs] of inputs [..., inputs] what the rows' adapters say."""
        if not self.rows.by_adapter:
            return output
        self.called = True
        rows = inputs[0].flatten(0, -2)
        assert len(rows) == self.rows.count, (
            f"a layer got {len(rows)} rows in a pass of {self.rows.count}"
        )
        total = output.flatten(0, -2)
        for name, index in self.rows.by_adapter.items():
            pair = self._pairs.get(name)
            if pair is not None:
                added = (rows[index] @ pair.down.T) @ pair.up.T
                total = total.index_add(0, index, added, alpha=pair.scaling)
        return total.view(output.shape)


class AdaptedModule:
    """A module to which adapters are added and from which they are removed while it runs, between passes.

    Args:
        module: Its linear layers are called, not read.
        prefixes: What the names of its layers may have before them in an adapter, such as `model.`.
        count_max: How many adapters there may be.
    """

    def __init__(
        self, module: nn.Module, *, prefixes: Sequence[str] = ("",), count_max: int
    ) -> None:
        """Take a module; nothing changes in it yet."""
        self._module = module
        self._prefixes = tuple(prefixes)
        self._count_max = count_max
        self._layers: dict[str, AdaptedLayer] = {}
        self._bytes: dict[str, int] = {}

    @property
    def bytes_by_adapter(self) -> Mapping[str, int]:
        """Bytes on the device of each adapter, for a ledger."""
        return dict(self._bytes)

    def add(self, name: str, adapter: Adapter) -> None:
        """Add an adapter, all of it or, where a layer cannot take it, nothing.

        Raises:
            CheckpointError: When there are too many, or one of that name, or it does not fit this module.
        """
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
        fitting = self._fitting(adapter)
        # Copied before any is put in its place, for the device's memory may run out.
        placed = [(own, layer, _to_layer(pair, layer)) for own, layer, pair in fitting]
        for own, layer, pair in placed:
            self._layers.setdefault(own, AdaptedLayer(layer)).add(name, pair)
        self._bytes[name] = sum(pair.down.nbytes + pair.up.nbytes for _, _, pair in placed)

    def check(self, adapter: Adapter) -> None:
        """Check that an adapter fits.

        Raises:
            CheckpointError: When it does not.
        """
        self._fitting(adapter)

    def _fitting(self, adapter: Adapter) -> list[tuple[str, nn.Linear, LowRankPair]]:
        return [(*self._find(module, pair), pair) for module, pair in adapter.pairs.items()]

    def remove(self, name: str) -> None:
        """Remove an adapter; layers that have none left are as they were."""
        del self._bytes[name]
        for layer in self._layers.values():
            layer.remove(name)

    @contextmanager
    def rows(self, names: Sequence[str | None]) -> Iterator[None]:
        """Run passes over so many rows with these adapters, None for the model alone, until the context ends."""
        missing = {name for name in names if name is not None} - self._bytes.keys()
        assert not missing, f"no adapter {sorted(missing)}"
        found: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            if name is not None:
                found.setdefault(name, []).append(row)
        device = next(self._module.parameters()).device
        by_adapter = {
            name: torch.tensor(rows, dtype=torch.int64, device=device)
            for name, rows in found.items()
        }
        self._tell(AdapterRows(len(names), by_adapter))
        try:
            yield
            unused = [own for own, each in self._layers.items() if each.waits_for(by_adapter)]
            assert not unused, f"layers with adapters were not called: {unused[:3]}"
        finally:
            self._tell(NO_ROWS)

    def _tell(self, rows: AdapterRows) -> None:
        for layer in self._layers.values():
            layer.rows, layer.called = rows, False

    def _find(self, module: str, pair: LowRankPair) -> tuple[str, nn.Linear]:
        """Return the layer that an adapter names, and its name here."""
        for prefix in self._prefixes:
            if not module.startswith(prefix):
                continue
            own = module.removeprefix(prefix)
            try:
                layer = self._module.get_submodule(own)
            except AttributeError:
                continue
            if not isinstance(layer, nn.Linear):
                kind = type(layer).__name__
                raise CheckpointError(
                    f"the adapter changes {module}, a {kind} here; only linear layers are served. "
                    "Remedy: use an adapter of linear layers, or merge this one into its base model."
                )
            wanted = [layer.in_features, layer.out_features]
            given = [pair.down.shape[1], len(pair.up)]
            if given != wanted:
                raise CheckpointError(
                    f"the adapter's {module} has {given} inputs and outputs, and the model's {wanted}. "
                    "Remedy: use an adapter that was trained on this model."
                )
            return own, layer
        raise CheckpointError(
            f"the adapter changes {module}, which the model lacks. "
            "Remedy: use an adapter that was trained on this model."
        )


def _to_layer(pair: LowRankPair, layer: nn.Linear) -> LowRankPair:
    like = layer.weight
    down, up = (each.to(device=like.device, dtype=like.dtype) for each in (pair.down, pair.up))
    return LowRankPair(down, up, pair.scaling)
