"""Traces: recorded or sampled workloads in published formats.

The format is detected from the first line. A file is read once on loading, to check every row, and
again whenever the workload is iterated, so a trace of any length takes no memory.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from vsched.errors import VschedError
from vsched.record.files import is_record
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Text, Workload

MOONCAKE_BLOCK = 512
"""Tokens per block hash in the Mooncake traces."""
BAILIAN_BLOCK = 16
"""Tokens per block hash in the Qwen Bailian traces."""
AZURE_IMAGE_TOKENS = 765
"""Tokens per image if a trace has only the number of images: those of 1024 x 1024 pixels in the recorded service."""
SHIFT = 1 << 40
"""Texts that occur once are numbered from here, to differ from shared blocks."""


class TraceError(VschedError):
    """An unreadable trace; the message starts with the path and the line."""


class TraceRow(NamedTuple):
    """A row of a trace: its request number and its fields."""

    number: int
    fields: Mapping[str, str]

    def count(self, name: str) -> int:
        """Return a field with a count of tokens."""
        value = self._number(name, "number")
        if value < 0 or value != int(value):
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


class _TraceRows(NamedTuple):
    """A parsed row."""

    at_s: float
    prompt: tuple[PromptPart, ...]
    output_tokens: int


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
    for arrival in parse(path):
        if arrival is None:
            skipped += 1
            continue
        first_ns = first_ns if requests else arrival.at_ns
        requests += 1
    if not requests:
        raise TraceError(f"{path}: no requests")

    def arrivals() -> Iterator[Arrival]:
        for arrival in parse(path):
            if arrival is not None:
                yield msgspec.structs.replace(arrival, at_ns=arrival.at_ns - first_ns)

    notes = (f"{skipped} rows without output tokens were left out",) if skipped else ()
    return Workload(path.name.partition(".")[0], arrivals, requests, notes)


Parse = Callable[[Path], Iterator[Arrival | None]]


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
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}:1: not a text: {error}") from error
    if first.startswith("{"):
        if '"hash_ids"' in first:
            return _parse_bailian if '"chat_id"' in first else _parse_mooncake
        return _parse_own
    columns = {name.strip() for name in first.split(",")}
    for wanted, read in CSV_FORMATS.items():
        if columns >= set(wanted):
            return lambda path: _parse_csv(path, read)
    known = "; ".join(",".join(wanted) for wanted in CSV_FORMATS)
    raise TraceError(
        f"{path}:1: this header is of no known format: {first[:120]!r}. Known: {known}; JSON lines of Mooncake "
        "(timestamp, input_length, output_length, hash_ids), of Qwen Bailian (with chat_id) and of our own "
        "(see docs/simulation.md)"
    )


# --- tables ---


def _parse_csv(path: Path, read: Callable[[TraceRow], _TraceRows]) -> Iterator[Arrival | None]:
    last_s = 0.0
    with _open(path) as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        number = 0
        try:
            for fields in reader:
                row = read(TraceRow(number, fields))
                if row.at_s < last_s:
                    raise ValueError(
                        f"it arrives {last_s - row.at_s:g} s before the row above; sort the file by time"
                    )
                last_s = row.at_s
                yield _arrival(number, row)
                number += 1
        except (ValueError, csv.Error) as error:
            raise TraceError(f"{path}:{reader.line_num}: {error}") from error


def _arrival(number: int, row: _TraceRows) -> Arrival | None:
    if not row.output_tokens or not row.prompt:
        return None
    return Arrival(
        at_ns=round(row.at_s * 1e9),
        request_id=f"r{number}",
        prompt=row.prompt,
        output_tokens=row.output_tokens,
    )


def _own_text(number: int, tokens: int) -> tuple[PromptPart, ...]:
    """Return a text that occurs once."""
    return (Text(SHIFT + number, tokens),) if tokens else ()


def _images(number: int, tokens: list[int]) -> tuple[PromptPart, ...]:
    """Return images that occur once; images without tokens are left out."""
    return tuple(Image(f"r{number}/{index}", count) for index, count in enumerate(tokens) if count)


def _read_servegen(row: TraceRow) -> _TraceRows:
    text = row.fields.get("image_tokens") or ""
    parts = [part.strip() for part in text.split("|") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"image_tokens is {text!r}, not counts with | between them")
    images = _images(row.number, [int(part) for part in parts])
    prompt = (*images, *_own_text(row.number, row.count("text_tokens")))
    return _TraceRows(row.seconds("arrival_s"), prompt, row.count("output_tokens"))


def _read_azure(row: TraceRow) -> _TraceRows:
    prompt = _own_text(row.number, row.count("ContextTokens"))
    return _TraceRows(_time_of(row), prompt, row.count("GeneratedTokens"))


def _read_azure_multimodal(row: TraceRow) -> _TraceRows:
    context, images = row.count("ContextTokens"), row.count("NumImages")
    # The context includes the images; at least one token of it is text.
    each = min(AZURE_IMAGE_TOKENS, max(context - 1, 0) // images) if images else 0
    parts = _images(row.number, [each] * images)
    prompt = (*parts, *_own_text(row.number, context - each * images))
    return _TraceRows(_time_of(row), prompt, row.count("GeneratedTokens"))


def _read_burstgpt(row: TraceRow) -> _TraceRows:
    prompt = _own_text(row.number, row.count("Request tokens"))
    return _TraceRows(row.seconds("Timestamp"), prompt, row.count("Response tokens"))


_EPOCH = datetime(1970, 1, 1)


def _time_of(row: TraceRow) -> float:
    text = (row.fields.get("TIMESTAMP") or "").strip()
    try:
        when = datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text!r}, not a date and time") from None
    return (when - _EPOCH) / timedelta(seconds=1)


CSV_FORMATS: dict[tuple[str, ...], Callable[[TraceRow], _TraceRows]] = {
    ("arrival_s", "text_tokens", "image_tokens", "output_tokens"): _read_servegen,
    ("TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens"): _read_azure_multimodal,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _read_azure,
    ("Timestamp", "Request tokens", "Response tokens"): _read_burstgpt,
}
"""Row parsers by required columns; the first match is used."""


# --- lines of JSON ---


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_mooncake = msgspec.json.Decoder(_Mooncake)
_own = msgspec.json.Decoder(Arrival)


def _lines(path: Path, decode: Callable[[str, int], Arrival | None]) -> Iterator[Arrival | None]:
    last_ns = number = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                arrival = decode(line, number)
                if arrival is not None and arrival.at_ns < last_ns:
                    early_s = (last_ns - arrival.at_ns) / 1e9
                    raise ValueError(
                        f"it arrives {early_s:g} s before the one above; sort the file by time"
                    )
            except (ValueError, msgspec.MsgspecError) as error:
                raise TraceError(f"{path}:{number}: {error}") from error
            last_ns = arrival.at_ns if arrival is not None else last_ns
            yield arrival


def _parse_own(path: Path) -> Iterator[Arrival | None]:
    return _lines(path, lambda line, _: _own.decode(line))


def _parse_mooncake(path: Path) -> Iterator[Arrival | None]:
    return _lines(path, _decode_mooncake)


def _decode_mooncake(line: str, number: int) -> Arrival | None:
    row = _mooncake.decode(line)
    length, blocks = row.input_length, len(row.hash_ids)
    if not (blocks - 1) * MOONCAKE_BLOCK < length <= blocks * MOONCAKE_BLOCK:
        raise ValueError(
            f"{blocks} hash_ids of {MOONCAKE_BLOCK} tokens each do not make {length} tokens"
        )
    if not row.output_length:
        return None
    last = length - (blocks - 1) * MOONCAKE_BLOCK
    sizes = [*[MOONCAKE_BLOCK] * (blocks - 1), last]
    return Arrival(
        at_ns=round(row.timestamp * 1e6),
        request_id=f"r{number}",
        prompt=tuple(map(Text, row.hash_ids, sizes)),
        output_tokens=row.output_length,
    )


class _Bailian(_Mooncake):
    chat_id: int
    parent_chat_id: int = -1


_bailian = msgspec.json.Decoder(_Bailian)


def _parse_bailian(path: Path) -> Iterator[Arrival | None]:
    """Parse a Qwen Bailian trace: timestamps in seconds, and each turn names the turn before it."""
    conversations: dict[int, int] = {}

    def decode(line: str, number: int) -> Arrival | None:
        row = _bailian.decode(line)
        first = conversations.get(row.parent_chat_id, row.chat_id)
        conversations[row.chat_id] = first
        if not row.output_length or not row.input_length:
            return None
        whole, rest = divmod(row.input_length, BAILIAN_BLOCK)
        parts = [Text(block, BAILIAN_BLOCK) for block in row.hash_ids[:whole]]
        rest += (whole - len(parts)) * BAILIAN_BLOCK
        last = row.hash_ids[whole] if len(row.hash_ids) > whole else SHIFT + number
        return Arrival(
            at_ns=round(row.timestamp * 1e9),
            request_id=f"r{number}",
            prompt=(*parts, Text(last, rest)) if rest else tuple(parts),
            output_tokens=row.output_length,
            conversation=str(first),
        )

    return _lines(path, decode)


def save_trace(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write a workload as a trace in vsched's format: one arrival per line."""
    encoder = msgspec.json.Encoder()
    with Path(path).open("wb") as file:
        file.writelines(encoder.encode(arrival) + b"\n" for arrival in workload)
