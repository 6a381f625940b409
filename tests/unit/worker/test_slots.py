"""Per-slot state comes from one table of fields."""

from __future__ import annotations

import numpy as np
import pytest

from vsched.worker.slots import STOP_TOKENS_MAX, SlotTable

COUNTED = {"tokens": "length", "block_table": "block_count"}
"""Wide fields, and the field with the length of their valid part."""


def test_slots_reset_covers_every_field() -> None:
    """A used slot is like a new one; its neighbours keep their state."""
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


def filled(slots: int) -> SlotTable:
    """Return a table whose every field holds other values in every slot (a flag: true in odd slots)."""
    table = SlotTable(slots, context_tokens=10, block_size=4)
    for place, field in enumerate(table.fields):
        rows = getattr(table, field.name)
        values = np.arange(rows.size).reshape(rows.shape) + 1 + 1000 * place
        rows[...] = values % 2 == 0 if field.dtype is np.bool_ else values
    return table


def rows_of(table: SlotTable, slot: int) -> dict[str, list[int]]:
    """Return all values of a slot, whatever the table of fields lists."""
    arrays = {name: one for name, one in vars(table).items() if isinstance(one, np.ndarray)}
    return {name: np.atleast_1d(rows[slot]).tolist() for name, rows in arrays.items()}


def test_slots_swap_covers_every_field() -> None:
    """Two slots exchange all their values, and no other slot changes."""
    table, before = filled(4), filled(4)
    assert all(
        rows_of(before, 0)[name] != rows_of(before, 3)[name] for name in rows_of(before, 0)
    ), "a field that is the same in both would prove nothing"
    table.swap(0, 3)
    for slot, was in enumerate((3, 1, 2, 0)):
        assert rows_of(table, slot) == rows_of(before, was), slot
    table.swap(2, 2)
    assert rows_of(table, 2) == rows_of(before, 2)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_slots_resize_covers_every_field(slots: int) -> None:
    """Remaining slots keep all their values, new ones are empty, in every field."""
    table, before = filled(3), filled(3)
    fresh = SlotTable(5, context_tokens=10, block_size=4)
    table.resize(slots)
    for slot in range(slots):
        assert rows_of(table, slot) == rows_of(before if slot < 3 else fresh, slot), slot
    for field in table.fields:
        rows = getattr(table, field.name)
        assert (len(rows), rows.dtype) == (slots, field.dtype), field.name


def test_slots_swap_and_reset_go_together() -> None:
    """A slot that was reset after a swap is like a new one."""
    table, fresh = filled(3), SlotTable(3, context_tokens=10, block_size=4)
    table.swap(0, 2)
    table.reset(2)
    narrow = {field.name for field in table.fields} - COUNTED.keys()
    for name in narrow:
        assert rows_of(table, 2)[name] == rows_of(fresh, 2)[name], name


def test_slots_table_lists_every_array() -> None:
    """The table has no array that `reset` does not know."""
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
