"""Replay: a kernel restored from a record handles the same events, and must return the same commands.

Each segment begins with a snapshot, so a record can be replayed without its first segments. The kernel is restored at
the start of each segment, so a wrong snapshot shows as a difference after it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Protocol

import msgspec

from vsched.config import Config
from vsched.config.policies import resolve_policies
from vsched.config.sections import PoliciesConfig
from vsched.errors import RecordError
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.commands import Accept, Command, Decide, Notice
from vsched.kernel.events import Event
from vsched.policy_host.snapshot import LAYOUT, restore_snapshot
from vsched.policy_host.stuck_calls import StuckCalls
from vsched.record.entries import (
    RecordedEvent,
    SegmentHeader,
    decode_command,
    decode_entry,
    decode_header,
    encode_commands,
)
from vsched.record.files import FrameReader, find_segments

SHOWN_MAX = 2000
"""Maximum number of shown characters of an event or a command."""
ReplayProgress = Callable[[int, int], None]
"""Called with the number of bytes that are replayed, and of all."""


class EventObserver(Protocol):
    """Gets every event of a replay or a simulation, in order."""

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        """Take an event, its commands, and the kernel after it."""


class ReplayObserver(EventObserver, Protocol):
    """Gets every replayed event, and the start."""

    def see_start(self, config: Config, kernel: Scheduler) -> None:
        """Take the configuration, and the kernel before the first event."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference between the record and the replay; the texts are for readers.

    `group` is the group of the decision, if any. `at_s` counts from the first replayed event.
    """

    number: int
    at_s: float
    segment: str
    group: str
    event: str
    expected: str
    got: str


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted request without a terminal reply at the end of the record: its client has to send it again.

    Further choices of one request have ids of their own.
    """

    request_id: str
    prompt_tokens: int
    images: int
    phase: str


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay; `difference` is None if all commands were the same."""

    recorded_with: str
    segments: int
    first_event: int
    events: int
    commands: int
    decisions: int
    requests: int
    span_s: float
    dropped_bytes: int
    difference: Difference | None
    unfinished: list[Unfinished] = []


def read_events(path: Path) -> Iterator[SegmentHeader | RecordedEvent]:
    """Yield the headers and events of a record, without a replay: of any version that had the same events.

    Raises:
        RecordError: If there is no record, it is damaged before its end, or a segment is missing.
    """
    for _, _, one in _entries(_readers(find_segments(path))):
        yield one


def _readers(segments: Sequence[Path]) -> list[FrameReader]:
    return [FrameReader(segment, newest=segment is segments[-1]) for segment in segments]


def _entries(
    readers: Sequence[FrameReader],
) -> Iterator[tuple[Path, int, SegmentHeader | RecordedEvent]]:
    """Yield the headers and events of consecutive segments, with their paths and the positions after them."""
    run, due = b"", 0
    one: SegmentHeader | RecordedEvent
    for reader in readers:
        for index, (position, body) in enumerate(reader.bodies()):
            try:
                if index:
                    one = decode_entry(body)
                    if one.number != due:
                        raise RecordError(f"event {one.number} follows, {due} was due")
                    due += 1
                else:
                    one = decode_header(body)
                    if run and one.run != run:
                        raise RecordError("a segment belongs to another record")
                    if run and one.number != due:
                        raise RecordError(
                            f"a segment is missing: event {one.number} follows, {due} was due"
                        )
                    run, due = one.run, one.number
            except RecordError as error:
                raise RecordError(f"{reader.path}: {error}") from error
            yield reader.path, position, one
    if not run:
        raise RecordError(
            f"{readers[-1].path}: nothing was recorded yet: its first entry is not complete"
        )


def replay(
    path: str | os.PathLike[str],
    *,
    on_progress: ReplayProgress | None = None,
    observer: ReplayObserver | None = None,
) -> ReplayReport:
    """Replay a record up to its end or the first difference.

    Raises:
        RecordError: If there is no record, it is damaged before its end, or its policies cannot be loaded.
    """
    return Replay(on_progress, observer).run(find_segments(Path(path)))


class Replay:
    """One replay; `kernel` is the scheduler after the last replayed event, None before the first segment."""

    def __init__(self, on_progress: ReplayProgress | None, observer: ReplayObserver | None) -> None:
        self._on_progress = on_progress
        self._observer = observer
        names = ("events", "commands", "decisions", "requests", "segments", "dropped_bytes")
        self._counts = Counter(dict.fromkeys((*names, "first_event"), 0))
        self._first_ns = self._last_ns = 0
        self.kernel: Scheduler | None = None
        self._version = ""

    def run(self, segments: Sequence[Path]) -> ReplayReport:
        """Replay segments of one record, the newest last.

        Raises:
            RecordError: If they cannot be replayed to their end; `kernel` is the state before the error.
        """
        with closing(StuckCalls(PoliciesConfig().call_limit_s)):
            return self._replay_segments(segments)

    def _replay_segments(self, segments: Sequence[Path]) -> ReplayReport:
        *starts, total = accumulate([one.stat().st_size for one in segments], initial=0)
        before, readers = dict(zip(segments, starts, strict=True)), _readers(segments)
        difference = None
        for path, position, one in _entries(readers):
            if self._on_progress is not None:
                self._on_progress(before[path] + position, total)
            try:
                if isinstance(one, SegmentHeader):
                    self._start_segment(one)
                else:
                    difference = self._replay_event(one, path.name)
            except RecordError as error:
                raise RecordError(f"{path}: {error}") from error
            if difference is not None:
                break
        self._counts["dropped_bytes"] = readers[-1].dropped_bytes
        assert self.kernel is not None, "there is a segment"
        return ReplayReport(
            recorded_with=self._version,
            span_s=(self._last_ns - self._first_ns) / 1e9,
            difference=difference,
            unfinished=[
                Unfinished(
                    request_id=state.request.request_id,
                    prompt_tokens=len(state.request.prompt_token_ids),
                    images=len(state.items),
                    phase=state.phase,
                )
                for state in self.kernel.requests
            ],
            **self._counts,
        )

    def _start_segment(self, header: SegmentHeader) -> None:
        try:
            config = msgspec.convert(header.config, Config)
            limits = msgspec.convert(header.limits, SchedulerLimits)
            fresh = Scheduler(limits, resolve_policies(config).for_kernel())
        except Exception as error:  # a damaged header, or one by hand, may have any values
            raise RecordError(
                f"recorded with vsched {header.version}, and its configuration does not load here: {error}"
            ) from error
        self._counts["segments"] += 1
        is_first = self.kernel is None
        if header.layout == LAYOUT:
            self.kernel = restore_snapshot(fresh, header.state)
        elif header.number and is_first:
            raise RecordError(
                f"recorded with vsched {header.version}, whose snapshots cannot be read here. "
                "Remedy: replay it from its first segment on, or with that version"
            )
        elif is_first:  # later, the events before lead to the state
            self.kernel = fresh
        if is_first:
            self._version, self._counts["first_event"] = header.version, header.number
            if self._observer is not None:
                assert self.kernel is not None
                self._observer.see_start(config, self.kernel)

    def _replay_event(self, entry: RecordedEvent, segment: str) -> Difference | None:
        """Let the kernel handle an event; return the difference to the record, if any."""
        assert self.kernel is not None
        if not self._counts["events"]:
            self._first_ns = entry.now_ns
        self._last_ns = entry.now_ns
        commands: Sequence[Command] = ()
        try:
            commands = self.kernel.handle(entry.event, entry.now_ns)
        except Exception as error:  # noqa: BLE001 - any error is a difference
            expected = "; ".join(_short(decode_command(one)) for one in entry.commands)
            got = f"the kernel failed: {type(error).__name__}: {error}"
            found: tuple[str, str, str] | None = ("", expected or "nothing", got)
        else:
            found = _compare(entry, commands)
        self._counts.update(
            events=1,
            commands=len(commands),
            decisions=sum(isinstance(command, Decide) for command in commands),
            requests=sum(isinstance(command, Accept) for command in commands),
        )
        if found is not None:
            group, expected, got = found
            return Difference(
                number=entry.number,
                at_s=(entry.now_ns - self._first_ns) / 1e9,
                segment=segment,
                group=group,
                event=_short(entry.event),
                expected=expected,
                got=got,
            )
        if self._observer is not None:
            self._observer.see(entry.now_ns, entry.event, commands, self.kernel)
        return None


def _compare(entry: RecordedEvent, commands: Sequence[Command]) -> tuple[str, str, str] | None:
    """Return group, recorded and replayed text of the first command that differs."""
    bodies, digest = encode_commands(commands)
    for expected, got in zip_longest(entry.commands, bodies):
        if expected == got:
            continue
        was, now = (None if body is None else decode_command(body) for body in (expected, got))
        if isinstance(was, Notice) and isinstance(now, Notice):
            continue  # it may quote a policy's message, with memory addresses
        return _group(was if now is None else now), _short(was), _short(now)
    if digest != entry.data_digest:
        group = next(filter(None, map(_group, commands)), "")
        was_data, now_data = (
            f"request data with the digest {one.hex()}" for one in (entry.data_digest, digest)
        )
        return group, was_data, now_data
    return None


def _group(command: Command | None) -> str:
    return str(getattr(command, "group", ""))


def _short(one: object) -> str:
    text = "nothing" if one is None else repr(one)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
