from __future__ import annotations

import numpy as np

from vsched.worker.slots import SlotTable

COUNTED = {"tokens": "length", "block_table": "block_count"}
"""Wide arrays, and the array with the length of their valid part."""


def test_slots_reset_covers_every_array() -> None:
    """A used slot is like a new one; its neighbours keep their state."""
    table, fresh = (SlotTable(3, context_tokens=200, block_size=4) for _ in range(2))
    assert (table.tokens.shape, table.block_table.shape) == ((3, 200), (3, 51)), "one block ahead"
    for rows in vars(table).values():
        rows[...] = 1
    table.reset(1)
    for name, rows in vars(table).items():
        assert (rows[[0, 2]] == 1).all(), name
        if name in COUNTED:
            assert getattr(table, COUNTED[name])[1] == 0
        else:
            assert np.array_equal(rows[1], getattr(fresh, name)[1]), name
