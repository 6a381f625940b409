"""Expansion of placeholders: the tokens of an image may include others than placeholders."""

from __future__ import annotations

from vsched.worker.contract import ImagePlan
from vsched.worker.expansion import expand_images, places_of

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
