"""Which rows of a pass have which adapter, and which of them a call of a product is about."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Owners = npt.NDArray[np.int64]
"""The adapter of each row, by its number; `NOBODY` for the model alone."""

NOBODY = -1


class CallRows:
    """The rows of a call of a product that have an adapter.

    Attributes:
        order: The rows, those of one adapter together; `owners` are their adapters. int64.
    """

    def __init__(self, owners: Owners, count: int) -> None:
        """Take the owners of the first rows of `count`; behind them is filling."""
        self._count = count
        order = np.argsort(owners, kind="stable")
        self.order = order[int((owners < 0).sum()) :]
        self.owners = owners[self.order]

    def of(self, count: int) -> CallRows:
        """Return the rows of a call of this many."""
        assert count == self._count, f"a layer got {count} rows in a pass of {self._count}"
        return self

    @functools.cached_property
    def groups(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Each adapter and its rows."""
        found = np.unique(self.owners).tolist()
        return [(each, torch.from_numpy(self.order[self.owners == each])) for each in found]

    def groups_on(self, device: torch.device) -> Sequence[tuple[int, torch.Tensor]]:
        """Return each adapter and its rows on a device, sent once."""
        if device.type == "cpu":
            return self.groups
        if self._sent is None:
            self._sent = [(owner, rows.to(device)) for owner, rows in self.groups]
        return self._sent

    _sent: Sequence[tuple[int, torch.Tensor]] | None = None


class PassRows:
    """The rows of a pass over a step: which of them a call is about, who runs the pass says."""

    def __init__(self, owners: Owners) -> None:
        """Take the owners of all rows."""
        self._owners = owners
        self._parts: dict[tuple[int, int], CallRows] = {}

    @property
    def all(self) -> CallRows:
        """Calls over all rows."""
        return self.part(0, len(self._owners))

    def part(self, start: int, stop: int) -> CallRows:
        """Return the rows [start, stop), of which those behind the last one are filling."""
        key = start, stop
        if key not in self._parts:
            self._parts[key] = CallRows(self._owners[start:stop], stop - start)
        return self._parts[key]

    def only(self, wanted: npt.NDArray[np.int64]) -> PassRows:
        """Return some of the rows, in this order."""
        return PassRows(self._owners[wanted])


class RowsOfOne:
    """Rows that all have one adapter, however many a call has: those of images."""

    def __init__(self, owner: int) -> None:
        """Take the adapter."""
        self._owner = owner
        self._calls: dict[int, CallRows] = {}

    def of(self, count: int) -> CallRows:
        """Return the rows of a call of this many."""
        if count not in self._calls:
            self._calls[count] = CallRows(np.full(count, self._owner), count)
        return self._calls[count]


class AdapterPass:
    """The pass that a module is in, if any of its rows has an adapter; one for all its products.

    Attributes:
        rows: All rows, where calls of a product may be about a part of them; None outside of such a pass.
        call: The rows of the call that is due; None where none has an adapter.
    """

    rows: PassRows | None = None
    call: CallRows | RowsOfOne | None = None
