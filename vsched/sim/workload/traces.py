"""Traces: recorded or sampled workloads in published formats.

The format is detected from the first line. A file is read once on loading, to check every row, and
again whenever the workload is iterated, so a trace of any length takes no memory.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

import msgspec

from vsched.errors import VschedError
from vsched.policy import Count
from vsched.record.files import is_record
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Text, Workload

T = TypeVar("T")
MOONCAKE_BLOCK = 512
"""Tokens per block hash in the Mooncake traces."""
BAILIAN_BLOCK = 16
"""Tokens per block hash in the Qwen Bailian traces."""
AZURE_IMAGE_TOKENS = 765
"""Tokens per image if a trace has only the number of images: those of 1024 x 1024 pixels in the recorded service."""
SHIFT = 1 << 40
"""Texts that occur once are numbered from here, to differ from shared blocks."""
NOT_READ = (OSError, EOFError, zlib.error)
"""Errors of a file that ends too early or is damaged, such as one whose download was cut off."""


class TraceError(VschedError):
    """An unreadable trace; the message starts with the path and the line."""


class TraceRow(NamedTuple):
    """A row of a table: its request number and its fields."""

    number: int
    fields: Mapping[str, str]

    def count(self, name: str) -> int:
        """Return a field with a count of tokens."""
        value = self._number(name, "number")
        if not 0 <= value < math.inf or value != int(value):
            raise ValueError(f"{name} is {value:g}, not a count")
        return int(value)

    def seconds(self, name: str) -> float:
        """Return a field with a time in seconds."""
        value = self._number(name, "time in seconds")
        if not 0 <= value < 1e9:
            raise ValueError(f"{name} is {value:g}, not a time in seconds")
        return value

    def _number(self, name: str, what: str) -> float:
        text = (self.fields.get(name) or "").strip()
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{name} is {text!r}, not a {what}") from None


def load_trace(path: str | os.PathLike[str]) -> Workload:
    """Return the workload of a trace; `.gz` files are decompressed.

    Raises:
        TraceError: When it cannot be read, its format is unknown, or a row is invalid; names the
            line and the problem.
    """
    path = Path(path)
    parse = _format_of(path)
    requests = skipped = 0
    first_ns = 0
    for arrival in _checked(path, parse):
        if arrival is None:
            skipped += 1
            continue
        first_ns = first_ns if requests else arrival.at_ns
        requests += 1
    if not requests:
        raise TraceError(f"{path}: no requests")

    def arrivals() -> Iterator[Arrival]:
        for arrival in _checked(path, parse):
            if arrival is not None:
                yield msgspec.structs.replace(arrival, at_ns=arrival.at_ns - first_ns)

    notes = (f"{skipped} rows without output tokens were left out",) if skipped else ()
    return Workload(path.name.partition(".")[0], arrivals, requests, notes)


class NumberedLines:
    """The lines of a file; `number` is that of the last one that was read."""

    def __init__(self, file: IO[str]) -> None:
        self.number = 1
        self._file = file

    def __iter__(self) -> Iterator[str]:
        for number, text in enumerate(self._file, 1):
            self.number = number
            yield text


Parse = Callable[[NumberedLines], Iterator[Arrival | None]]
"""Yields the requests of a trace, None for one without output tokens."""


def _checked(path: Path, parse: Parse) -> Iterator[Arrival | None]:
    """Yield the requests of a trace, which must be sorted by time."""
    last_ns = 0
    with _open(path) as file:
        lines = NumberedLines(file)
        try:
            for arrival in parse(lines):
                if arrival is not None:
                    if arrival.at_ns < last_ns:
                        early_s = (last_ns - arrival.at_ns) / 1e9
                        raise ValueError(
                            f"it arrives {early_s:g} s before the row above; sort the file by time"
                        )
                    last_ns = arrival.at_ns
                yield arrival
        except (*NOT_READ, ValueError, csv.Error, msgspec.MsgspecError) as error:
            raise TraceError(f"{path}:{lines.number}: {error}") from error


def _open(path: Path) -> IO[str]:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error


def _format_of(path: Path) -> Parse:
    if is_record(path):
        raise TraceError(f"{path}: a record of a server. Remedy: vsched.sim.load_record")
    with _open(path) as file:
        try:
            first = file.readline().strip()
        except (*NOT_READ, UnicodeDecodeError) as error:
            raise TraceError(f"{path}:1: not a text: {error}") from error
    if first.startswith("{"):
        if '"hash_ids"' in first:
            return _parse_bailian if '"chat_id"' in first else _parse_mooncake
        return _parse_own
    columns = {name.strip() for name in first.split(",")}
    for wanted, read in CSV_FORMATS.items():
        if columns >= set(wanted):
            return partial(_parse_csv, read)
    known = "; ".join(",".join(wanted) for wanted in CSV_FORMATS)
    raise TraceError(
        f"{path}:1: this header is of no known format: {first[:120]!r}. Known: {known}; JSON lines of Mooncake "
        "(timestamp, input_length, output_length, hash_ids), of Qwen Bailian (with chat_id) and of our own "
        "(see docs/simulation.md)"
    )


# --- tables ---


def _parse_csv(
    read: Callable[[TraceRow], Arrival | None], lines: NumberedLines
) -> Iterator[Arrival | None]:
    for number, fields in enumerate(csv.DictReader(lines, skipinitialspace=True)):
        yield read(TraceRow(number, fields))


def _arrival(
    row: TraceRow,
    at_s: float,
    text_tokens: int,
    output_tokens: int,
    image_tokens: Sequence[int] = (),
) -> Arrival | None:
    """Return a request whose text and images occur once; images without tokens are left out."""
    prompt: list[PromptPart] = [
        Image(f"r{row.number}/{index}", count) for index, count in enumerate(image_tokens) if count
    ]
    if text_tokens:
        prompt.append(Text(SHIFT + row.number, text_tokens))
    if not output_tokens or not prompt:
        return None
    return Arrival(
        at_ns=round(at_s * 1e9),
        request_id=f"r{row.number}",
        prompt=tuple(prompt),
        output_tokens=output_tokens,
    )


def _read_servegen(row: TraceRow) -> Arrival | None:
    text = row.fields.get("image_tokens") or ""
    parts = [part.strip() for part in text.split("|") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"image_tokens is {text!r}, not counts with | between them")
    texts, outputs = row.count("text_tokens"), row.count("output_tokens")
    return _arrival(row, row.seconds("arrival_s"), texts, outputs, [int(part) for part in parts])


def _read_azure(row: TraceRow) -> Arrival | None:
    return _arrival(row, _time_of(row), row.count("ContextTokens"), row.count("GeneratedTokens"))


def _read_azure_multimodal(row: TraceRow) -> Arrival | None:
    context, images = row.count("ContextTokens"), row.count("NumImages")
    # The context includes the images; at least one token of it is text.
    each = min(AZURE_IMAGE_TOKENS, max(context - 1, 0) // images) if images else 0
    outputs = row.count("GeneratedTokens")
    return _arrival(row, _time_of(row), context - each * images, outputs, [each] * images)


def _read_burstgpt(row: TraceRow) -> Arrival | None:
    tokens, outputs = row.count("Request tokens"), row.count("Response tokens")
    return _arrival(row, row.seconds("Timestamp"), tokens, outputs)


_EPOCH = datetime(1970, 1, 1)


def _time_of(row: TraceRow) -> float:
    text = (row.fields.get("TIMESTAMP") or "").strip()
    try:
        when = datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text!r}, not a date and time") from None
    return (when - _EPOCH) / timedelta(seconds=1)


CSV_FORMATS: dict[tuple[str, ...], Callable[[TraceRow], Arrival | None]] = {
    ("arrival_s", "text_tokens", "image_tokens", "output_tokens"): _read_servegen,
    ("TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens"): _read_azure_multimodal,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _read_azure,
    ("Timestamp", "Request tokens", "Response tokens"): _read_burstgpt,
}
"""Row parsers by required columns; the first match is used."""


# --- lines of JSON ---


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: list[int]


class _Bailian(_Mooncake):
    chat_id: int
    parent_chat_id: int = -1


def _rows(lines: NumberedLines, kind: type[T]) -> Iterator[T]:
    """Yield the values of all lines that are not empty."""
    decode = msgspec.json.Decoder(kind).decode
    return (decode(text) for text in lines if text.strip())


def _parse_own(lines: NumberedLines) -> Iterator[Arrival]:
    return _rows(lines, Arrival)


def _parse_mooncake(lines: NumberedLines) -> Iterator[Arrival | None]:
    for row in _rows(lines, _Mooncake):
        length, blocks = row.input_length, len(row.hash_ids)
        if not (blocks - 1) * MOONCAKE_BLOCK < length <= blocks * MOONCAKE_BLOCK:
            raise ValueError(
                f"{blocks} hash_ids of {MOONCAKE_BLOCK} tokens each do not make {length} tokens"
            )
        sizes = [*[MOONCAKE_BLOCK] * (blocks - 1), length - (blocks - 1) * MOONCAKE_BLOCK]
        prompt = map(Text, row.hash_ids, sizes)
        yield _of_blocks(row, lines.number, row.timestamp * 1e6, prompt)


def _parse_bailian(lines: NumberedLines) -> Iterator[Arrival | None]:
    """Parse a Qwen Bailian trace: timestamps in seconds, and each turn names the turn before it."""
    conversations: dict[int, int] = {}
    for row in _rows(lines, _Bailian):
        first = conversations.get(row.parent_chat_id, row.chat_id)
        conversations[row.chat_id] = first
        whole, rest = divmod(row.input_length, BAILIAN_BLOCK)
        parts = [Text(block, BAILIAN_BLOCK) for block in row.hash_ids[:whole]]
        rest += (whole - len(parts)) * BAILIAN_BLOCK
        if rest:
            last = row.hash_ids[whole] if len(row.hash_ids) > whole else SHIFT + lines.number
            parts.append(Text(last, rest))
        yield _of_blocks(row, lines.number, row.timestamp * 1e9, parts, str(first))


def _of_blocks(
    row: _Mooncake, number: int, at_ns: float, prompt: Iterable[Text], conversation: str = ""
) -> Arrival | None:
    if not row.output_length or not row.input_length:
        return None
    return Arrival(
        at_ns=round(at_ns),
        request_id=f"r{number}",
        prompt=tuple(prompt),
        output_tokens=row.output_length,
        conversation=conversation,
    )


def save_trace(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write a workload as a trace in vsched's format: one arrival per line."""
    encoder = msgspec.json.Encoder()
    with Path(path).open("wb") as file:
        file.writelines(encoder.encode(arrival) + b"\n" for arrival in workload)
