"""A replay as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

The trace has a process for each group, with a track for each of its ranks and a slice for each step; and a process for
the scheduler, with counters, marks and a slice for each request. Events are written at once, so a long record needs no
memory.

Two steps of a group may be in flight, and ranks run them in turn. So a slice begins when its step was decided or when
the step before it was done, whichever is later. It is no longer than the time that the ranks reported.

Source: "Trace Event Format", the JSON format of Chrome's trace viewer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import IO, Any

import msgspec

from vsched.config import Config
from vsched.kernel import Scheduler
from vsched.kernel.commands import (
    Accept,
    Command,
    Decide,
    Drained,
    Finish,
    Notice,
    Refuse,
    RejectArrival,
)
from vsched.kernel.decisions import Decision, GenerateDecision
from vsched.kernel.events import (
    Cleared,
    Drain,
    Encoded,
    EncodeFailed,
    Event,
    GroupLost,
    GroupReady,
    GroupRetired,
    Resume,
    Stepped,
)
from vsched.types import group_names

SCHEDULER = 1
"""Process number of the scheduler; groups follow."""
NOTICE_SHOWN_MAX = 300
PHASES = ("queued", "prefill", "decode")


class _Track:
    """A group: its steps in flight, with the times of their decisions, and when its latest step was done."""

    def __init__(self, process: int, ranks: int) -> None:
        self.process = process
        self.ranks = ranks
        self.steps: deque[tuple[Decision, int]] = deque()
        self.free_ns = 0
        self.lengths: dict[int, int] = {}

    def finishes(self, decision: GenerateDecision) -> int:
        """Return the number of chunks that end a prompt: each yields a first token."""
        for join in decision.joined:
            self.lengths[join.slot] = join.length
        return sum(self.lengths.get(chunk.slot) == chunk.stop for chunk in decision.chunks)


class TraceTimeline:
    """Writes the trace of a replay; `close` ends the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._tracks: dict[str, _Track] = {}
        self._live: dict[int, tuple[str, int]] = {}
        self._first_ns: int | None = None
        self._now_ns = 0
        self._counters: dict[str, dict[str, int]] = {}
        self.events = 0
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')

    def see_start(self, config: Config, kernel: Scheduler | None = None) -> None:
        """Name the tracks."""
        self._name_track(SCHEDULER, "scheduler")
        for stage, section in (("encode", config.encode), ("generate", config.generate)):
            for group in group_names(stage, section.replicas):
                self._track(group, section.tensor_parallel)

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        """Write an event and the commands that followed."""
        if self._first_ns is None:
            self._first_ns = now_ns
        self._now_ns = now_ns
        self._see_event(event)
        for command in commands:
            self._see_command(command)
        self._write_counters(kernel.statistics())

    def close(self) -> None:
        """Write the requests that have not ended, and end the file."""
        for number, (name, submitted_ns) in self._live.items():
            self._span(number, f"{name} (goes on)", submitted_ns, self._now_ns)
        self._file.write(b"\n]}\n")

    # --- events ---

    def _see_event(self, event: Event) -> None:
        match event:
            case Stepped() | Encoded():
                self._land(event)
            case EncodeFailed(group=group, failure=failure):
                self._land(event)
                self._mark(group, f"encode failed: {failure.message}")
            case GroupLost(group=group, failure=failure):
                track = self._track(group)
                if track.steps:  # the others had not begun
                    self._slice(track, track.steps[0], {"lost": len(track.steps)})
                    track.steps.clear()
                self._mark(group, f"lost: {failure}")
            case GroupRetired(group=group, failure=failure):
                self._mark(group, f"retired: {failure}")
            case GroupReady(group=group) | Drain(group=group) | Resume(group=group):
                self._mark(group, type(event).__name__)
            case Cleared(message=message):
                self._mark("", f"cleared: {message}")
            case _:
                pass

    def _land(self, event: Stepped | Encoded | EncodeFailed) -> None:
        track = self._track(event.group)
        if not track.steps or track.steps[0][0].step != event.step:
            return  # it was decided before the first segment of the record
        step = track.steps.popleft()
        if isinstance(event, Stepped):
            yielded = len(event.tokens) - event.tokens.count(-1)
            self._slice(track, step, {"yielded": yielded}, event.busy_ns)
        else:
            self._slice(track, step, {})

    def _slice(
        self, track: _Track, step: tuple[Decision, int], more: dict[str, Any], busy_ns: int = 0
    ) -> None:
        decision, decided_ns = step
        start_ns = max(decided_ns, track.free_ns)
        if busy_ns:
            start_ns = max(start_ns, self._now_ns - busy_ns)
        track.free_ns = self._now_ns
        args: dict[str, Any] = {"step": decision.step, **more}
        if isinstance(decision, GenerateDecision):
            firsts = track.finishes(decision)
            prefill = sum(chunk.stop - chunk.start for chunk in decision.chunks)
            args["decodes"] = max(more.get("yielded", 0) - firsts, 0)
            args["chunks"] = len(decision.chunks)
            args["prefill_tokens"] = prefill
            args["joined"] = [join.number for join in decision.joined]
            args["left"] = [leave.number for leave in decision.left]
            name = f"prefill {prefill}" if prefill else "decode"
            if prefill and args["decodes"]:
                name += f" + decode {args['decodes']}"
        else:
            args["items"] = len(decision.tasks)
            args["tokens"] = sum(task.tokens for task in decision.tasks)
            name = f"encode {len(decision.tasks)}"
        for rank in range(track.ranks):
            self._write(
                ph="X",
                name=name,
                pid=track.process,
                tid=rank + 1,
                ts=self._at(start_ns),
                dur=(self._now_ns - start_ns) / 1000,
                args=args,
            )

    # --- commands ---

    def _see_command(self, command: Command) -> None:
        match command:
            case Decide(group, decision):
                self._track(group).steps.append((decision, self._now_ns))
            case Accept(request_id, number):
                self._live[number] = (request_id, self._now_ns)
            case Finish():
                self._end_request(command)
            case Refuse(request_id=name, code=code):
                self._mark("", f"refused {name}: {code}")
            case RejectArrival(reason=reason, base_url=base_url):
                self._mark("", f"redirected to {base_url}" if base_url else f"rejected: {reason}")
            case Drained(group):
                self._mark(group, "drained")
            case Notice(message):
                self._mark("", message[:NOTICE_SHOWN_MAX])
            case _:
                pass

    def _end_request(self, finish: Finish) -> None:
        """Write a request and its phases."""
        times, number = finish.times, finish.number
        name, submitted_ns = self._live.pop(number, (finish.request_id, times.submitted_ns))
        args = {"reason": finish.reason.value, "code": finish.code}
        for field in ("cached_tokens", "encoded_items", "preemptions"):
            args[field] = getattr(times, field)
        self._span(number, name, submitted_ns, self._now_ns, args)
        admitted_ns, first_ns = times.admitted_ns, times.first_token_ns
        start_ns = submitted_ns
        for phase, end_ns in zip(PHASES, (admitted_ns, first_ns, self._now_ns), strict=True):
            self._span(number, phase, start_ns, end_ns or self._now_ns)
            if not end_ns:
                break
            start_ns = end_ns

    def _span(
        self, number: int, name: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        """Write a slice of a request's own track: spans within spans."""
        common = {"cat": "request", "id": number, "name": name, "pid": SCHEDULER, "tid": 1}
        self._write(ph="b", ts=self._at(start_ns), args=args or {}, **common)
        self._write(ph="e", ts=self._at(end_ns), **common)

    # --- counters ---

    def _write_counters(self, statistics: dict[str, Any]) -> None:
        encode = statistics["encode"]
        used = encode["pages_total"] - encode["pages_free"] - encode["pages_evictable"]
        found = {
            "requests": {"waiting": statistics["waiting"], "running": statistics["running"]},
            "encode queue": {
                "waiting": encode["waiting_items"],
                "encoding": encode["running_items"],
            },
            "embedding pages": {"in use": used, "cached": encode["pages_evictable"]},
            "prompt tokens": {
                "computed": statistics["generate"]["tokens_prefilled"],
                "from the cache": statistics["generate"]["tokens_cached"],
            },
        }
        groups = statistics["generate"].get("groups") or {"generate": statistics["generate"]}
        for name, group in groups.items():
            blocks = {"held": group["blocks_held"], "cached": group["blocks_cached"]}
            found[f"KV blocks of {name}"] = blocks
        for name, values in found.items():
            if self._counters.get(name) != values:
                self._counters[name] = values
                self._write(
                    ph="C", name=name, pid=SCHEDULER, ts=self._at(self._now_ns), args=values
                )

    # --- the file ---

    def _track(self, group: str, ranks: int = 1) -> _Track:
        track = self._tracks.get(group)
        if track is None:
            track = self._tracks[group] = _Track(SCHEDULER + 1 + len(self._tracks), ranks)
            self._name_track(track.process, group)
            for rank in range(ranks):
                args = {"name": f"rank {rank}"}
                self._write(ph="M", name="thread_name", pid=track.process, tid=rank + 1, args=args)
        return track

    def _name_track(self, process: int, name: str) -> None:
        self._write(ph="M", name="process_name", pid=process, args={"name": name})
        self._write(ph="M", name="process_sort_index", pid=process, args={"sort_index": process})

    def _mark(self, group: str, text: str) -> None:
        process = self._track(group).process if group else SCHEDULER
        self._write(ph="i", name=text, pid=process, tid=1, ts=self._at(self._now_ns), s="p")

    def _at(self, time_ns: int) -> float:
        """Return microseconds since the first event; times before it count as 0."""
        return max(time_ns - (self._first_ns or 0), 0) / 1000

    def _write(self, **event: Any) -> None:
        self._file.write(b",\n" if self.events else b"\n")
        self._file.write(msgspec.json.encode(event))
        self.events += 1
