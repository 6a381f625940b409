"""A recorded run of a server as a workload, and the costs of its steps: what another policy would have done.

Only the events and commands of the record are read, and the scheduler is not replayed, so a record of another version
or with a policy that has changed since can be simulated as well. A prompt becomes a text for each KV block, numbered by
the digest of its tokens, and a reply for the tokens that another request of the record generated. So shared beginnings
stay shared, and the workload has no token ids.
"""

from __future__ import annotations

import os
import statistics
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from vsched.errors import RecordError
from vsched.kernel.commands import (
    Accept,
    AdmitArrival,
    Command,
    Decide,
    Finish,
    Refuse,
    RejectArrival,
)
from vsched.kernel.decisions import Decision, EncodeDecision, GenerateDecision
from vsched.kernel.events import (
    Arrived,
    Encoded,
    EncodeFailed,
    Event,
    GroupLost,
    PolicyReplaced,
    Stepped,
    Submitted,
    Withdrawn,
)
from vsched.kernel.request import chain_hashes, root_hash
from vsched.record import read_events
from vsched.record.entries import SegmentHeader, decode_command
from vsched.sim.cost.calibration import (
    Observation,
    ObservedRequest,
    ObservedStep,
    as_observed,
    calibrate,
    encode_sample,
    generate_sample,
)
from vsched.sim.cost.model import CostModel, EncodeSample, GenerateSample
from vsched.sim.fast.metrics import Collector, LiveRequest, Targets, TenantFigures
from vsched.sim.workload.requests import (
    TEXT_BITS,
    Arrival,
    Image,
    PromptPart,
    Reply,
    Text,
    Workload,
)
from vsched.types import FinishReason, Request

STEPS_MIN = 50
"""Minimum number of generate steps for a fit of their times."""
STEPS_MAX = 20_000
"""Maximum number of steps of a group in the fit."""
PIXELS_PER_TOKEN = 784
"""Pixels per image token, by which the preparation of images is measured: a record has only their tokens."""
BLOCKS_MAX = 1 << 18
"""Maximum number of generated KV blocks that later prompts may repeat; the oldest are forgotten."""


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded run.

    Attributes:
        config: The configuration of the server, for `load_config(base=...)`.
        kv_tokens: Tokens of a replica's KV cache.
        workload: The requests; its notes name all that differs from the run.
        cost: Step times of the run; None if it has too few steps.
        measured: What the clients of the run got, counted as in a simulation.
    """

    config: dict[str, Any]
    kv_tokens: int
    workload: Workload
    cost: CostModel | None
    measured: TenantFigures


class _Generated(msgspec.Struct, frozen=True):
    """The tokens of a finished request, and its prompt."""

    tokens: array[int]
    prompt_length: int
    prompt: tuple[PromptPart, ...]


class _RecordedRequest(msgspec.Struct, eq=False):
    """An accepted or refused request of a record; `hashes` are those of the full blocks of its prompt."""

    request: Request
    name: str
    sent_ns: int
    prompt: tuple[PromptPart, ...]
    hashes: list[bytes]
    outputs: list[int]
    ended_ns: int = 0
    output_tokens: int = 0
    leaves_ns: int | None = None

    def arrival(self, unknown_tokens: int, first_ns: int) -> Arrival:
        """Return it as an arrival; `unknown_tokens` is the length of an output that did not end."""
        request, limit = self.request, max(self.request.sampling.max_tokens, 1)
        expected = limit if self.leaves_ns is not None else min(unknown_tokens, limit)
        return Arrival(
            at_ns=self.sent_ns - first_ns,
            request_id=self.name,
            prompt=self.prompt,
            output_tokens=self.output_tokens or max(expected, len(self.outputs)),
            tenant=request.tenant,
            adapter=f"adapter-{request.adapter}" if request.adapter else "",
            priority=request.priority,
            ttft_target_ms=request.ttft_target_ms,
            max_tokens=limit,
            leaves_ns=self.leaves_ns,
            cache_salt=request.cache_salt,
        )


def load_record(path: str | os.PathLike[str]) -> RecordedRun:
    """Read a record of `vsched serve --record`, with all its segments.

    Raises:
        RecordError: If there is no record, it is damaged before its end, or it has no requests.
    """
    path = Path(path)
    reader: _RecordReader | None = None
    for one in read_events(path):
        if isinstance(one, SegmentHeader):
            reader = reader or _RecordReader(one)
        else:
            assert reader is not None, "a record begins with a header"
            commands = [decode_command(command) for command in one.commands]
            reader.read_event(one.now_ns, one.event, commands)
    assert reader is not None, "a record without a header is an error"
    return reader.recorded_run(path)


class _RecordReader:
    """Reads the events of a record in order."""

    def __init__(self, header: SegmentHeader) -> None:
        self._config = header.config
        self._block_size: int = header.limits["block_size"]
        self._kv_tokens = self._block_size * int(header.limits["blocks"])
        self._found: list[_RecordedRequest] = []
        self._live: dict[int, _RecordedRequest] = {}
        self._names: Counter[str] = Counter()
        self._replies: dict[bytes, _Generated] = {}
        self._collector = Collector(Targets(), 0)
        self._notes: Counter[str] = Counter()
        if header.number:
            self._notes[f"begins with event {header.number}: earlier requests are left out"] = 1
        self._began_ns = -1
        # Preparation of requests by arrival id: when they were sent and admitted.
        self._sent: dict[int, tuple[int, str]] = {}
        self._admitted: dict[int, int] = {}
        self._overlapping: set[int] = set()
        self._prepared: list[ObservedRequest] = []
        # Steps by group.
        self._decided: dict[str, deque[tuple[int, Decision]]] = {}
        self._slots: dict[str, dict[int, int]] = {}
        self._lengths: dict[str, dict[int, int]] = {}
        self._ended_ns: dict[str, int] = {}
        self._steps: dict[str, list[ObservedStep]] = {}
        self._pixels = [0, 0]

    def read_event(self, now_ns: int, event: Event, commands: Sequence[Command]) -> None:
        """Read an event and the commands that followed."""
        if self._began_ns < 0:
            self._began_ns = now_ns
        self._take_event(event, commands, now_ns)
        for command in commands:
            match command:
                case AdmitArrival(arrival_id):
                    if self._admitted:
                        self._overlapping |= {*self._admitted, arrival_id}
                    self._admitted[arrival_id] = now_ns
                case RejectArrival(arrival_id):
                    _, tenant = self._sent.pop(arrival_id, (0, ""))
                    self._collector.count_failure("shed", tenant, command.reason)
                    self._notes["rejected requests are left out: their prompts were not read"] += 1
                case Decide(group, decision):
                    self._decided.setdefault(group, deque()).append((now_ns, decision))
                case Finish():
                    self._finish(command, now_ns)
                case _:
                    pass

    def _take_event(self, event: Event, commands: Sequence[Command], now_ns: int) -> None:
        match event:
            case Arrived():
                self._sent[event.arrival_id] = now_ns, event.tenant
                self._collector.arrived(now_ns, event.tenant)
            case Withdrawn():
                self._withdraw(event.arrival_id)
            case Submitted():
                self._submit(event, commands, now_ns)
            case Stepped() | Encoded() | EncodeFailed():
                self._land(event, now_ns)
            case GroupLost(group):
                for by_group in (self._decided, self._slots, self._lengths):
                    by_group.pop(group, None)
                self._notes[f"{group} was lost; simulate it with --outage"] += 1
            case PolicyReplaced():
                self._notes["policies were replaced; those of the start are simulated"] += 1
            case _:
                pass

    # --- requests ---

    def _withdraw(self, arrival_id: int) -> None:
        self._admitted.pop(arrival_id, None)
        sent = self._sent.pop(arrival_id, None)
        if sent is not None:
            self._collector.count_failure("withdrawn", sent[1])
            self._notes["requests are left out: they ended before their prompts were read"] += 1

    def _submit(self, event: Submitted, commands: Sequence[Command], now_ns: int) -> None:
        request = event.request
        sent = self._sent.pop(event.arrival_id, None)
        if sent is None:
            self._collector.arrived(now_ns, request.tenant)
        sent_ns = now_ns if sent is None else sent[0]
        began_ns = self._admitted.pop(event.arrival_id, None)
        if began_ns is not None and event.arrival_id not in self._overlapping:
            tokens = sum(item.tokens for item in request.items)
            observed = ObservedRequest(
                tokens=len(request.prompt_token_ids),
                images=len(request.items),
                pixels=tokens * PIXELS_PER_TOKEN,
                received_ns=began_ns,
                submitted_ns=now_ns,
            )
            self._prepared.append(observed)
        self._overlapping.discard(event.arrival_id)
        for item in request.items:
            if item.encoded:
                self._notes["images came as embeddings, and are simulated as images"] += 1
            elif item.extent is not None:
                self._pixels[0] += item.extent.size
                self._pixels[1] += item.tokens
        prompt, hashes = self._prompt_of(request)
        numbers = [command.number for command in commands if isinstance(command, Accept)]
        if event.further:
            self._notes["further choices are simulated as requests of their own"] += (
                len(numbers) - 1
            )
        for number in numbers or [0]:
            self._names[request.request_id] += 1
            count = self._names[request.request_id]
            one = _RecordedRequest(
                request=request,
                name=request.request_id if count == 1 else f"{request.request_id} {count}",
                sent_ns=sent_ns,
                prompt=prompt,
                hashes=hashes,
                outputs=[*event.emitted] if number == (numbers or [0])[0] else [],
            )
            self._found.append(one)
            if number:
                self._live[number] = one
        for command in commands:
            if isinstance(command, Refuse):
                self._collector.count_failure(command.code, request.tenant)
                self._notes["refused requests have the median output length"] += 1

    def _finish(self, finish: Finish, now_ns: int) -> None:
        one = self._live.pop(finish.number, None)
        if one is None:
            return  # accepted before the record began
        one.ended_ns = now_ns
        if finish.reason is FinishReason.ABORT and not finish.message:
            one.leaves_ns = now_ns - one.sent_ns
        elif finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            one.output_tokens = max(len(one.outputs), 1)
            self._keep_output(one)
        live = LiveRequest(
            one.arrival(1, 0),
            sent_ns=one.sent_ns,
            prompt_tokens=len(one.request.prompt_token_ids),
            pixels={},
        )
        self._collector.count_end(live, finish, now_ns)

    # --- prompts ---

    def _prompt_of(self, request: Request) -> tuple[tuple[PromptPart, ...], list[bytes]]:
        """Return the parts of a prompt, and the hashes of its full blocks."""
        tokens = array("i", request.prompt_token_ids)
        hashes = chain_hashes(
            tokens,
            request.items,
            block_size=self._block_size,
            parent=root_hash(request.cache_salt, request.adapter),
        )
        earlier = next(filter(None, map(self._replies.get, reversed(hashes))), None)
        if earlier is None:
            return (*self._parts(request, tokens, 0),), hashes
        common, limit = earlier.prompt_length, min(len(tokens), len(earlier.tokens))
        while common < limit and tokens[common] == earlier.tokens[common]:
            common += 1
        reply = Reply(common - earlier.prompt_length)
        return (*earlier.prompt, reply, *self._parts(request, tokens, common)), hashes

    def _parts(self, request: Request, tokens: array[int], start: int) -> Iterator[PromptPart]:
        """Yield texts, which end with a KV block, and images."""
        position = start
        for item in request.items:
            if item.offset >= start:
                yield from self._texts(tokens, position, item.offset)
                yield Image(item.key.hex(), item.tokens)
                position = item.end
                between = position - item.offset - item.tokens
                if between:
                    yield Text(_number_of(item.key), between)
        yield from self._texts(tokens, position, len(tokens))

    def _texts(self, tokens: array[int], start: int, stop: int) -> Iterator[Text]:
        size = self._block_size
        while start < stop:
            end = min((start // size + 1) * size, stop)
            yield Text(_number_of(tokens[start:end].tobytes()), end - start)
            start = end

    def _keep_output(self, one: _RecordedRequest) -> None:
        """Remember the blocks that a request generated, which a later prompt may repeat."""
        request, length = one.request, len(one.request.prompt_token_ids)
        tokens = array("i", [*request.prompt_token_ids, *one.outputs])
        generated = _Generated(tokens, length, one.prompt)
        for block in chain_hashes(
            tokens,
            request.items,
            block_size=self._block_size,
            parent=one.hashes[-1] if one.hashes else root_hash(request.cache_salt, request.adapter),
            start_block=len(one.hashes),
        ):
            self._replies[block] = generated
        while len(self._replies) > BLOCKS_MAX:
            del self._replies[next(iter(self._replies))]

    # --- steps ---

    def _land(self, event: Stepped | Encoded | EncodeFailed, now_ns: int) -> None:
        waiting = self._decided.get(event.group)
        if not waiting or waiting[0][1].step != event.step:
            return  # decided before the record began
        decided_ns, decision = waiting.popleft()
        since_ns = max(decided_ns, self._ended_ns.get(event.group, 0))
        self._ended_ns[event.group] = now_ns
        if isinstance(event, Stepped):
            assert isinstance(decision, GenerateDecision)
            sample: EncodeSample | GenerateSample | None = self._step(event, decision)
        elif isinstance(event, Encoded):
            assert isinstance(decision, EncodeDecision)
            sample = encode_sample(decision, now_ns - since_ns)
        else:
            sample = None
        steps = self._steps.setdefault(event.group, [])
        if sample is None or not 0 < sample.ns <= now_ns - decided_ns or len(steps) >= STEPS_MAX:
            return
        paused = isinstance(decision, EncodeDecision) and 0 < decision.time_slice_ns < sample.ns
        steps.append(
            ObservedStep(
                group=event.group,
                sample=sample,
                decided_ns=decided_ns,
                ended_ns=now_ns,
                paused=paused,
            )
        )

    def _step(self, event: Stepped, decision: GenerateDecision) -> GenerateSample | None:
        """Note the outputs of a step; return its contents, None if they are not all known or it was not measured."""
        slots = self._slots.setdefault(event.group, {})
        lengths = self._lengths.setdefault(event.group, {})
        for leave in decision.left:
            slots.pop(leave.slot, None)
        for join in decision.joined:
            slots[join.slot], lengths[join.slot] = join.number, join.length
        yielded = [slot for slot, token in enumerate(event.tokens) if token >= 0]
        for slot in yielded:
            self._note_outputs(slots.get(slot), [event.tokens[slot]])
        known = {*yielded, *(chunk.slot for chunk in decision.chunks)} <= lengths.keys()
        busy_ns = event.busy_ns - event.swap_ns
        sample = generate_sample(decision, yielded, lengths, busy_ns) if known else None
        for drafted in event.drafted:
            self._note_outputs(slots.get(drafted.slot), drafted.tokens)
            if drafted.slot in lengths:
                lengths[drafted.slot] += len(drafted.tokens)
        return None if event.drafted else sample  # the cost of drafts is not in the model

    def _note_outputs(self, number: int | None, tokens: list[int]) -> None:
        one = None if number is None else self._live.get(number)
        if one is not None:
            one.outputs += tokens

    # --- results ---

    def recorded_run(self, path: Path) -> RecordedRun:
        """Return the run.

        Raises:
            RecordError: If it has no requests.
        """
        if not self._found:
            raise RecordError(f"{path}: no requests")
        found = sorted(self._found, key=lambda one: one.sent_ns)
        if open_ones := len(self._live):
            self._notes["requests had not ended, and have the median output length"] = open_ones
        outputs = [one.output_tokens for one in found if one.output_tokens]
        usual = int(statistics.median(outputs)) if outputs else 1
        arrivals = [*_in_sessions(found, usual)]
        notes = (self._measured(), *(_note(text, count) for text, count in self._notes.items()))
        return RecordedRun(
            config=self._config,
            kv_tokens=self._kv_tokens,
            workload=Workload(path.name, lambda: iter(arrivals), len(arrivals), notes),
            cost=self._cost(path),
            measured=self._collector.figures(),
        )

    def _measured(self) -> str:
        one = self._collector.figures()
        times = (
            f"{name} p50 / p95 / p99 {spread.line} ms"
            for name, spread in (("TTFT", one.ttft_ms), ("TPOT", one.tpot_ms))
        )
        return (
            f"measured in the recorded run: {one.finished:,} of {one.requests:,} requests finished, "
            f"{', '.join(times)}"
        )

    def _cost(self, path: Path) -> CostModel | None:
        """Return the costs of the steps; None if there are too few."""
        steps = [step for group in self._steps.values() for step in group]
        generate = [step for step in steps if isinstance(step.sample, GenerateSample)]
        if len(generate) < STEPS_MIN:
            return None
        observation = Observation(
            rounds_ns=[self._began_ns], steps=steps, jobs=[], requests=self._prepared
        )
        size, tokens = self._pixels
        more = {"bytes_per_token": -(-size // tokens)} if size else {}
        model = calibrate(
            observation,
            name=path.name,
            source=f"{len(generate):,} steps of the record",
            partial=True,
            kv_tokens=self._kv_tokens,
            pixels_per_token=PIXELS_PER_TOKEN,
            **more,
        )
        return as_observed(model, observation)


def _in_sessions(found: Sequence[_RecordedRequest], usual: int) -> Iterator[Arrival]:
    """Yield requests as arrivals; one that was sent after the previous one of its session follows that one."""
    first_ns = found[0].sent_ns
    before: dict[str, tuple[str, int]] = {}
    for index, one in enumerate(found):
        arrival = one.arrival(usual, first_ns)
        session = one.request.session
        if session:
            name, ended_ns = before.get(session, (session, 0))
            follows = 0 < ended_ns <= one.sent_ns
            if session in before and not follows:
                name = f"{session} {index}"
            arrival = msgspec.structs.replace(
                arrival,
                conversation=name,
                think_ns=one.sent_ns - ended_ns if follows else 0,
            )
            before[session] = name, one.ended_ns
        yield arrival


def _number_of(content: bytes) -> int:
    """Return the number of a text with this content."""
    return int.from_bytes(blake2b(content, digest_size=8).digest()) >> (64 - 2 * TEXT_BITS)


def _note(text: str, count: int) -> str:
    return f"{text} ({count:,})" if count > 1 else text
