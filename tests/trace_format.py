"""What Perfetto's importer of the Trace Event Format needs; events without it are dropped or end up in wrong places.

Its own parser, `trace_processor`, is a binary that the package `perfetto` downloads when it runs, which a test without
network cannot do. These are the rules of its `json_trace_parser`: types of fields, slices of a track that nest, and
spans that begin before they end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "b": {"name", "ts", "pid", "cat", "id"},
    "e": {"name", "ts", "pid", "cat", "id"},
    "M": {"name", "pid", "args"},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}


def check_trace_events(events: Sequence[dict[str, Any]]) -> None:
    """Check the events of a trace."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    spans: dict[tuple[str, Any, str], list[float]] = {}
    for one in events:
        kind = one["ph"]
        assert REQUIRED[kind] <= one.keys(), one
        assert type(one["pid"]) is int, one
        if kind == "M":
            assert METADATA[one["name"]] in one["args"], one
            continue
        assert type(one["ts"]) in (int, float), one
        assert one["ts"] >= 0, one
        if kind == "X":
            assert one["dur"] >= 0, one
            track = slices.setdefault((one["pid"], one["tid"]), [])
            track.append((one["ts"], one["ts"] + one["dur"]))
        elif kind == "C":
            assert all(type(value) in (int, float) for value in one["args"].values()), one
        elif kind in "be":
            open_ones = spans.setdefault((one["cat"], one["id"], one["name"]), [])
            if kind == "b":
                open_ones.append(one["ts"])
            else:
                assert open_ones, f"ends before it begins: {one}"
                assert open_ones.pop() <= one["ts"], one
    assert not any(spans.values()), "spans without an end"
    for track in slices.values():
        track.sort(key=lambda span: (span[0], -span[1]))
        enclosing: list[float] = []
        for start, end in track:
            while enclosing and enclosing[-1] <= start + ROUNDED:
                enclosing.pop()
            assert not enclosing or end <= enclosing[-1] + ROUNDED, "slices overlap without nesting"
            enclosing.append(end)


ROUNDED = 1e-3
"""Microseconds by which times of a trace are rounded."""
