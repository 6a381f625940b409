"""Arena bytes that travel with decisions: what a step reads, and what it writes.

The host is sent exactly the rows that a chunk covers, again with every chunk, so it need not track which pages are
still valid. A row is sent once for each time that it is prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence

from vsched.aio.hosts.messages import ByteRange
from vsched.kernel.decisions import ChunkPlan, EncodeDecision, EncodeTask, GenerateDecision
from vsched.types import ArenaLayout, ItemPlace
from vsched.wire import LogEntry


class Traffic:
    """Bytes read by one group's decisions; follows its log, because a chunk names a slot, not the request's images."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._items: dict[int, Sequence[ItemPlace]] = {}
        self._slots: dict[int, int] = {}

    def read_by(self, entry: LogEntry) -> list[ByteRange]:
        """Return the ranges that ranks read for the next entry of the log."""
        if isinstance(entry, EncodeDecision):
            return [ByteRange(task.extent.offset, task.extent.size) for task in entry.tasks]
        if not isinstance(entry, GenerateDecision):
            return []
        self._follow(entry)
        return [where for chunk in entry.chunks for where in self._rows_of(chunk)]

    def _follow(self, decision: GenerateDecision) -> None:
        for leave in decision.left:
            self._slots.pop(leave.slot, None)
            if not leave.keep:
                self._items.pop(leave.number, None)
        for number in decision.forgotten:
            self._items.pop(number, None)
        for join in decision.joined:
            finished = self._slots.get(join.slot)  # decisions do not say that a request finished
            if finished is not None:
                self._items.pop(finished, None)
            self._slots[join.slot] = join.number
            if join.data is not None:
                self._items[join.number] = join.data.items

    def _rows_of(self, chunk: ChunkPlan) -> list[ByteRange]:
        places = {place.offset: place for place in self._items[self._slots[chunk.slot]]}
        return [
            where
            for item in chunk.items
            for _, row, rows in places[item.offset].rows(chunk.start, chunk.stop)
            for where in row_ranges(self._layout, item.pages, row, row + rows)
        ]


def written_by(layout: ArenaLayout, tasks: Sequence[EncodeTask]) -> list[ByteRange]:
    """Return the ranges that the embedding rows of a batch are written to."""
    return [where for task in tasks for where in row_ranges(layout, task.pages, 0, task.tokens)]


def row_ranges(layout: ArenaLayout, pages: Sequence[int], start: int, stop: int) -> list[ByteRange]:
    """Return the ranges of rows [start, stop) of an embedding in these pages; adjacent ones are merged."""
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
