"""Data sent along with decisions: exactly what their ranks read and write."""

from __future__ import annotations

from vsched.aio.hosts.link import ByteRange
from vsched.aio.hosts.remote import Traffic, row_ranges, written_by
from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    EncodeDecision,
    EncodeTask,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
)
from vsched.types import ArenaLayout, Extent, ItemPlace, SamplingParams
from vsched.wire import Heartbeat

LAYOUT = ArenaLayout(pixel_bytes=100, pages=8, page_rows=4, row_bytes=16)
BASE = LAYOUT.embedding_offset
PAGE = 64


def joined(number: int, slot: int, items: list[ItemPlace] | None) -> Join:
    data = None
    if items is not None:
        data = RequestData(b"", 40, items, SamplingParams(), ())
    return Join(number, slot, 0, 40, [], data)


def test_traffic_of_a_batch_is_its_pixels_there_and_its_rows_back() -> None:
    task = EncodeTask(b"key", 6, Extent(10, 30), [5, 2])
    batch = EncodeDecision(1, [task])
    traffic = Traffic(LAYOUT)
    assert traffic.read_by(batch) == [ByteRange(10, 30)]
    assert written_by(LAYOUT, batch.tasks) == [
        ByteRange(BASE + 5 * PAGE, PAGE),
        ByteRange(BASE + 2 * PAGE, 2 * 16),
    ]


def test_traffic_of_a_chunk_is_the_rows_that_it_covers() -> None:
    """Rows 2 to 6 of an item at position 10: the end of its first page, and the beginning of its second."""
    traffic = Traffic(LAYOUT)
    chunk = ChunkPlan(3, 12, 17, [ChunkItem(10, 8, [6, 1])])
    decision = GenerateDecision(1, joined=[joined(7, 3, [ItemPlace(10, 8)])], chunks=[chunk])
    assert traffic.read_by(decision) == [
        ByteRange(BASE + 6 * PAGE + 2 * 16, 2 * 16),
        ByteRange(BASE + 1 * PAGE, 3 * 16),
    ]
    assert traffic.read_by(Heartbeat()) == []


def test_traffic_of_spans_leaves_out_what_is_no_placeholder() -> None:
    """Row numbers of an item with separators count placeholders only."""
    traffic = Traffic(LAYOUT)
    place = ItemPlace(10, 4, b"", ((10, 12), (13, 15)))
    chunk = ChunkPlan(0, 12, 14, [ChunkItem(10, 4, [3])])
    decision = GenerateDecision(1, joined=[joined(1, 0, [place])], chunks=[chunk])
    assert traffic.read_by(decision) == [ByteRange(BASE + 3 * PAGE + 2 * 16, 16)]


def test_traffic_knows_who_came_back_and_forgets_who_is_gone() -> None:
    traffic = Traffic(LAYOUT)
    chunk = ChunkPlan(1, 0, 4, [ChunkItem(0, 4, [0])])
    here = [ItemPlace(0, 4)]
    traffic.read_by(GenerateDecision(1, joined=[joined(5, 1, here)]))
    traffic.read_by(GenerateDecision(2, left=[Leave(5, 1, keep=True)]))
    back = GenerateDecision(3, joined=[joined(5, 1, None)], chunks=[chunk])
    assert traffic.read_by(back) == [ByteRange(BASE, PAGE)]
    # It finishes, which no decision says, and another request takes its slot.
    traffic.read_by(GenerateDecision(4, joined=[joined(6, 1, here)]))
    assert set(traffic._items) == {6}
    traffic.read_by(GenerateDecision(5, left=[Leave(6, 1, keep=True)], forgotten=[]))
    traffic.read_by(GenerateDecision(6, forgotten=[6]))
    assert not traffic._items
    assert not traffic._slots


def test_row_ranges_join_neighbouring_pages() -> None:
    assert row_ranges(LAYOUT, [2, 3, 5], 0, 12) == [
        ByteRange(BASE + 2 * PAGE, 2 * PAGE),
        ByteRange(BASE + 5 * PAGE, PAGE),
    ]
    assert row_ranges(LAYOUT, [2], 1, 1) == []
