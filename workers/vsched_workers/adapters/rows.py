"""The adapter of each row of a pass, and the rows of each call of a product."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Owners = npt.NDArray[np.int64]
"""The number of each row's adapter; `NOBODY` for the base model."""

NOBODY = -1


class CallRows:
    """The rows of a product's call that have an adapter.

    Attributes:
        order: The rows, grouped by adapter; `owners` are their adapters. int64.
    """

    def __init__(self, owners: Owners, count: int) -> None:
        """Take the owners of the first rows of `count`; the others are padding."""
        self._count = count
        order = np.argsort(owners, kind="stable")
        self.order = order[int((owners < 0).sum()) :]
        self.owners = owners[self.order]

    def of(self, count: int) -> CallRows:
        """Return the rows of a call with `count` rows."""
        assert count == self._count, f"a layer got {count} rows in a pass of {self._count}"
        return self

    @functools.cached_property
    def groups(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Each adapter and its rows."""
        found = np.unique(self.owners).tolist()
        return [(each, torch.from_numpy(self.order[self.owners == each])) for each in found]

    def groups_on(self, device: torch.device) -> Sequence[tuple[int, torch.Tensor]]:
        """Return each adapter and its rows on a device, copied once."""
        if device.type == "cpu":
            return self.groups
        if self._sent is None:
            self._sent = [(owner, rows.to(device)) for owner, rows in self.groups]
        return self._sent

    _sent: Sequence[tuple[int, torch.Tensor]] | None = None


class PassRows:
    """The rows of a pass over a step; the code that runs the pass selects the rows of each call."""

    def __init__(self, owners: Owners) -> None:
        """Take the owners of all rows."""
        self._owners = owners
        self._parts: dict[tuple[int, int], CallRows] = {}

    @property
    def all(self) -> CallRows:
        """The rows of calls over all rows."""
        return self.part(0, len(self._owners))

    def part(self, start: int, stop: int) -> CallRows:
        """Return the rows [start, stop); rows after the last one are padding."""
        key = start, stop
        if key not in self._parts:
            self._parts[key] = CallRows(self._owners[start:stop], stop - start)
        return self._parts[key]

    def only(self, wanted: npt.NDArray[np.int64]) -> PassRows:
        """Return some of the rows, in this order."""
        return PassRows(self._owners[wanted])


class RowsOfOne:
    """Rows of one adapter, for calls with any number of rows, as for images."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._calls: dict[int, CallRows] = {}

    def of(self, count: int) -> CallRows:
        """Return the rows of a call with `count` rows."""
        if count not in self._calls:
            self._calls[count] = CallRows(np.full(count, self._owner), count)
        return self._calls[count]


class AdapterPass:
    """The current pass over a module, if any row has an adapter; shared by all its products.

    Attributes:
        rows: All rows, if calls of a product may use a part of them; None outside of such a pass.
        call: The rows of the next call; None if no row has an adapter.
    """

    rows: PassRows | None = None
    call: CallRows | RowsOfOne | None = None
