"""Expansion of placeholders, and slots of a rank."""

from __future__ import annotations

import numpy as np

from vsched.worker.contract import ImagePlan
from vsched.worker.expansion import expand_images, places_of
from vsched.worker.slots import SlotTable

IMAGE, BREAK, END = 5, 6, 7


def test_expansion_of_rows_with_separators() -> None:
    """The spans of an image contain its placeholders only, not the separators around them."""
    rows = ImagePlan((), 6, (8, IMAGE, IMAGE, IMAGE, BREAK, IMAGE, IMAGE, IMAGE, END))
    plain = ImagePlan((), 2)
    ids, spans = expand_images([1, IMAGE, IMAGE, 2], [rows, plain], placeholder=IMAGE)
    assert ids == [1, *rows.expansion, IMAGE, IMAGE, 2]
    assert spans == [((2, 5), (6, 9)), ((10, 12),)]
    places = [at for runs in spans for start, stop in runs for at in range(start, stop)]
    assert [at for at, token in enumerate(ids) if token == IMAGE] == places


def test_places_are_all_there_are() -> None:
    """At both ends, adjacent, or nowhere."""
    assert places_of([IMAGE, 1, IMAGE, IMAGE, 2, IMAGE], IMAGE) == [0, 2, 3, 5]
    assert places_of([1, 2], IMAGE) == []
    assert places_of([], IMAGE) == []


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
