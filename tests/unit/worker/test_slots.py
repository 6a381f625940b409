"""Per-slot state comes from one table of fields."""

from __future__ import annotations

import numpy as np

from vsched.worker.slots import STOP_TOKENS_MAX, SlotTable

COUNTED = {"tokens": "length", "block_table": "block_count"}
"""Wide fields, and the field that tells how much of a row is meaningful."""


def test_slots_reset_covers_every_field() -> None:
    """E6: a slot that was used is as one that never was; its neighbours keep what they have."""
    table = SlotTable(3, context_tokens=200, block_size=4)
    fresh = SlotTable(3, context_tokens=200, block_size=4)
    for field in table.fields:
        getattr(table, field.name)[...] = 1
    table.reset(1)
    for field in table.fields:
        rows = getattr(table, field.name)
        assert (rows[[0, 2]] == 1).all(), field.name
        if field.name in COUNTED:
            assert getattr(table, COUNTED[field.name])[1] == 0
        else:
            assert (rows[1] == getattr(fresh, field.name)[1]).all(), field.name


def test_slots_table_lists_every_array() -> None:
    """E6: no array beside the table that `reset` would not know of."""
    table = SlotTable(2, context_tokens=10, block_size=4)
    arrays = {name for name, value in vars(table).items() if isinstance(value, np.ndarray)}
    assert arrays == {field.name for field in table.fields}
    assert arrays == set(SlotTable.__annotations__)


def test_slots_shapes_and_empty_values() -> None:
    table = SlotTable(2, context_tokens=10, block_size=4)
    for field in table.fields:
        rows = getattr(table, field.name)
        assert rows.dtype == field.dtype
        assert rows.shape == ((2, field.width) if field.width else (2,))
        assert (rows == field.empty).all()
    assert table.stop_tokens.shape[1] == STOP_TOKENS_MAX
    assert table.block_table.shape[1] == 3 + 1, "a step ahead, a slot that is full may grow"
    assert table.tokens.shape[1] == 10
