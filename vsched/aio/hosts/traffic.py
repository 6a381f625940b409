"""What decisions read of the arena, and what they write there: the bytes that travel with them.

Exactly the rows that a chunk covers are sent, with each chunk anew: so a host need not know what became of a page
since, and its arena is never wrong about one. A row travels once for each time that it is prefilled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vsched.aio.hosts.messages import ByteRange
from vsched.kernel.decisions import ChunkPlan, EncodeDecision, EncodeTask, GenerateDecision
from vsched.types import ArenaLayout, ItemPlace
from vsched.wire import LogEntry


class RowsRead(NamedTuple):
    """The rows of an item that a chunk reads: its pages, where all of its rows lie, and where those lie."""

    pages: list[int]
    all: list[ByteRange]
    read: list[ByteRange]


class Traffic:
    """The bytes of one group's decisions; it follows the log, for a chunk names a slot and not its request's images."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._items: dict[int, Sequence[ItemPlace]] = {}
        self._slots: dict[int, int] = {}

    def pixels_of(self, batch: EncodeDecision) -> list[ByteRange]:
        """Return what ranks read when they encode a batch."""
        return [ByteRange(task.extent.offset, task.extent.size) for task in batch.tasks]

    def read_by(self, entry: LogEntry) -> list[RowsRead]:
        """Return the rows that ranks read when they carry out the next entry of the log, by item."""
        if not isinstance(entry, GenerateDecision):
            return []
        self._follow(entry)
        return [read for chunk in entry.chunks for read in self._rows_of(chunk)]

    def _follow(self, decision: GenerateDecision) -> None:
        for leave in decision.left:
            self._slots.pop(leave.slot, None)
            if not leave.keep:
                self._items.pop(leave.number, None)
        for number in decision.forgotten:
            self._items.pop(number, None)
        for join in decision.joined:
            finished = self._slots.get(join.slot)  # ranks see by themselves that it has
            if finished is not None:
                self._items.pop(finished, None)
            self._slots[join.slot] = join.number
            if join.data is not None:
                self._items[join.number] = join.data.items

    def _rows_of(self, chunk: ChunkPlan) -> Iterator[RowsRead]:
        places = {place.offset: place for place in self._items[self._slots[chunk.slot]]}
        for item in chunk.items:
            read = [
                where
                for _, row, rows in places[item.offset].rows(chunk.start, chunk.stop)
                for where in row_ranges(self._layout, item.pages, row, row + rows)
            ]
            yield RowsRead(item.pages, row_ranges(self._layout, item.pages, 0, item.tokens), read)


def written_by(layout: ArenaLayout, tasks: Sequence[EncodeTask]) -> list[ByteRange]:
    """Return where the rows of a batch, or a part of one, come to lie."""
    return [where for task in tasks for where in row_ranges(layout, task.pages, 0, task.tokens)]


def row_ranges(layout: ArenaLayout, pages: Sequence[int], start: int, stop: int) -> list[ByteRange]:
    """Return where rows [start, stop) of an embedding in these pages lie, neighbours in one."""
    found: list[ByteRange] = []
    row = start
    while row < stop:
        page, first = divmod(row, layout.page_rows)
        past = min(layout.page_rows, first + stop - row)
        offset = (
            layout.embedding_offset + (pages[page] * layout.page_rows + first) * layout.row_bytes
        )
        size = (past - first) * layout.row_bytes
        if found and found[-1].offset + found[-1].size == offset:
            found[-1] = ByteRange(found[-1].offset, found[-1].size + size)
        else:
            found.append(ByteRange(offset, size))
        row += past - first
    return found
