"""The trace of a run in another host of policies: arrivals for `vsched simulate --trace`, and measured times.

Prompts are described by the hashes of their KV blocks, so that shared beginnings stay shared in a simulation. Next to
the trace, a file of the same name with `.run` has the times of requests and steps, to fit a cost model to them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec

from vsched.errors import ConfigError
from vsched.policy.measured import StepTime
from vsched.policy_host import HostedRequest
from vsched.sim.cost.model import (
    CostModel,
    EncodeCost,
    GenerateCost,
    HostCost,
    fit_linear,
    fit_totals,
)
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Text

BLOCKS_MAX = 1 << 18
"""Maximum number of KV blocks whose content is remembered; later ones begin a new text each time."""


class RunHeader(msgspec.Struct, frozen=True, kw_only=True, tag="host", tag_field="kind"):
    """The host of a run, the first line; `depth` is its maximum number of steps in flight."""

    host: str
    slots: int
    batch_tokens: int
    block_size: int
    kv_tokens: int
    depth: int = 1
    prefix_cache: bool = True
    step_target_ms: float = 0.0
    prefill_target_ms: float = 0.0


class HostStep(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """The composition of a step, and its time from decision, or the result before it, to result.

    `image_pairs` is the sum of the squared token counts of the images that it encodes.
    """

    ended_ns: int
    busy_ns: int
    decodes: int
    context_tokens: int
    prefill_tokens: int
    pairs: float
    images: int = 0
    image_tokens: int = 0
    image_pairs: int = 0


class HostRequest(msgspec.Struct, frozen=True, kw_only=True, tag="request", tag_field="kind"):
    """A request that ended, with its times from arrival until the scheduler, a slot, the first token and the end."""

    request_id: str
    tenant: str
    ended_ns: int
    prepared_ns: int = 0
    queued_ns: int
    ttft_ns: int
    total_ns: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int


ImageAt = tuple[str, int, int]
"""Key, offset in the prompt, and number of tokens of an image."""
RunLine = RunHeader | HostStep | HostRequest


def run_file(trace: str | Path) -> Path:
    """Return the file with the times of a run, next to its trace."""
    return Path(f"{trace}.run")


class HostRecorder:
    """Writes a request as an arrival once it and all earlier ones have ended: its length is part of an arrival."""

    def __init__(self, trace: str, header: RunHeader) -> None:
        """Open the files.

        Raises:
            ConfigError: If they cannot be written.
        """
        self._files: list[BinaryIO] = []
        try:
            for path in (Path(trace), run_file(trace)):
                self._files.append(path.open("wb"))
        except OSError as error:
            raise ConfigError(
                f"trace: {trace} cannot be written ({error}). Remedy: name a file in a folder that exists"
            ) from error
        self._trace, self._run = self._files
        self._encode = msgspec.json.Encoder().encode
        self._open: dict[int, Arrival | None] = {}
        self._sent: dict[int, tuple[int, int, str]] = {}
        self._texts: dict[Hashable, int] = {}
        self._began_ns, self._last_ns, self._block_size = -1, 0, header.block_size
        self._write(self._run, header)

    def note_arrival(self, request: HostedRequest, now_ns: int) -> None:
        """Note a request that reaches the scheduler, in order."""
        number = request.order[0]
        if self._began_ns < 0:
            self._began_ns = request.arrived_ns
        self._last_ns = max(request.arrived_ns - self._began_ns, self._last_ns)
        self._open[number] = None
        conversation = request.session
        if conversation and any(conversation == other for *_, other in self._sent.values()):
            conversation = (
                f"{conversation} {number}"  # turns of one conversation would wait for each other
            )
        self._sent[number] = self._last_ns, now_ns - request.arrived_ns, conversation

    def note_end(
        self,
        request: HostedRequest,
        name: str,
        now_ns: int,
        hashes: Sequence[Hashable] = (),
        images: Sequence[ImageAt] = (),
        *,
        kept: bool,
    ) -> None:
        """Note the end of a request; it is not `kept` if its client left.

        `hashes` has a hash per KV block, of all tokens up to its end.
        """
        number = request.order[0]
        if number not in self._open:
            return
        at_ns, prepared_ns, conversation = self._sent.pop(number)
        if not kept or not request.output_tokens:
            del self._open[number]
        else:
            first_ns = request.first_ns or now_ns
            line = HostRequest(
                request_id=name,
                tenant=request.tenant,
                ended_ns=now_ns,
                prepared_ns=prepared_ns,
                queued_ns=request.joined_ns - request.arrived_ns,
                ttft_ns=first_ns - request.arrived_ns,
                total_ns=now_ns - request.arrived_ns,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                cached_tokens=request.cached,
                preemptions=request.preemptions,
            )
            self._write(self._run, line)
            parts = tuple(self._parts(number, request.prompt_tokens, images, hashes))
            self._open[number] = self._arrival(name, at_ns, conversation, request, parts)
        while self._open:
            first, arrival = next(iter(self._open.items()))
            if arrival is None:
                break
            del self._open[first]
            self._write(self._trace, arrival)
        for file in self._files:
            file.flush()  # the process may be killed at any time

    def note_step(self, time: StepTime, context_tokens: int, images: Sequence[int]) -> None:
        """Note a step; `context_tokens` are those of decoding requests, `images` the tokens of encoded images."""
        self._write(
            self._run,
            HostStep(
                ended_ns=time.ended_ns,
                busy_ns=time.busy_ns,
                decodes=time.decodes,
                context_tokens=context_tokens,
                prefill_tokens=time.prefill_tokens,
                pairs=time.pairs,
                images=len(images),
                image_tokens=sum(images),
                image_pairs=sum(count * count for count in images),
            ),
        )

    def close(self) -> None:
        """Write the arrivals that have ended, and close the files."""
        for arrival in filter(None, self._open.values()):
            self._write(self._trace, arrival)
        self._open.clear()
        for file in self._files:
            file.close()

    def _write(self, file: BinaryIO, one: RunLine | Arrival) -> None:
        file.write(self._encode(one) + b"\n")

    def _arrival(
        self,
        name: str,
        at_ns: int,
        conversation: str,
        one: HostedRequest,
        parts: tuple[PromptPart, ...],
    ) -> Arrival:
        wait_ns = None if one.target_ns is None else max(one.target_ns - one.arrived_ns, 0)
        return Arrival(
            at_ns=at_ns,
            request_id=name,
            prompt=parts,
            output_tokens=one.output_tokens,
            conversation=conversation,
            tenant=one.tenant,
            priority=one.priority,
            ttft_target_ms=None if wait_ns is None else wait_ns // 1_000_000,
        )

    def _parts(
        self, number: int, tokens: int, images: Sequence[ImageAt], hashes: Sequence[Hashable]
    ) -> Iterator[PromptPart]:
        """Yield texts and images; the first text may share its beginning with another request."""
        position = 0
        for key, offset, length in (*images, ("", tokens, 0)):
            if position:
                if offset > position:  # after an image, each text is its own
                    yield Text((1 << 50) + (number << 20) + position, offset - position)
            else:
                yield from self._first_text(number, offset, hashes)
            if length:
                yield Image(key, length)
            position = offset + length

    def _first_text(self, number: int, tokens: int, hashes: Sequence[Hashable]) -> Iterator[Text]:
        size, texts = self._block_size, self._texts
        shared: dict[int, int] = {}
        for one in hashes[: tokens // size]:
            if (text := texts.get(one)) is not None:
                shared[text] = shared.get(text, 0) + size
            elif len(texts) < BLOCKS_MAX:
                texts[one] = number
        for text, count in shared.items():
            yield Text(text, count)
        if rest := tokens - sum(shared.values()):
            yield Text(number, rest)


STEPS_MIN = 50
"""Minimum number of steps for a fit."""


class HostRunFile(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of a run."""

    header: RunHeader
    steps: tuple[HostStep, ...]
    requests: tuple[HostRequest, ...]

    def ttft_ms(self) -> dict[str, list[float]]:
        """Return sorted times to first token by tenant, and of all requests under an empty name."""
        found: dict[str, list[float]] = defaultdict(list)
        for one in self.requests:
            for name in {"", one.tenant}:
                found[name].append(one.ttft_ns / 1e6)
        return {name: sorted(times) for name, times in sorted(found.items())}


def read_run(path: Path) -> HostRunFile:
    """Read a run.

    Raises:
        ConfigError: If the file cannot be read, or is not a run with enough steps.
    """
    decode = msgspec.json.Decoder(RunLine).decode
    try:
        lines = [decode(line) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: not a run ({error}). Remedy: name the file .run next to a trace"
        ) from error
    steps = tuple([one for one in lines if isinstance(one, HostStep) and one.busy_ns > 0])
    if not lines or not isinstance(lines[0], RunHeader) or len(steps) < STEPS_MIN:
        raise ConfigError(
            f"{path}: {len(steps)} steps, too few for a fit. Remedy: record at least {STEPS_MIN}"
        )
    requests = tuple([one for one in lines if isinstance(one, HostRequest)])
    return HostRunFile(header=lines[0], steps=steps, requests=requests)


def fit_run(run: HostRunFile, base: CostModel, *, name: str) -> CostModel:
    """Fit the steps of a run; the shape of the model is that of `base`.

    A step with images encodes them before its tokens; in a simulation with `placement = "together"`, that is a step of
    its own. Preparation is the time until the scheduler has a request, at its least: a step that runs can delay it.
    """
    steps = [one for one in run.steps if one.decodes or one.prefill_tokens]
    rows = [
        (
            *(1.0, one.decodes, one.context_tokens, one.prefill_tokens, one.pairs),
            *(one.images, one.image_tokens, one.image_pairs),
        )
        for one in steps
    ]
    costs, error = fit_totals(rows, [one.busy_ns for one in steps])
    step_ns, decode_ns, context_ns, prefill_ns, pair_ns, *of_images = costs
    item_ns, token_ns, token_pair_ns = of_images
    request_ns, prompt_token_ns = _preparation(run)
    usual_ns = statistics.median(one.busy_ns for one in run.steps)
    gaps = [
        after.ended_ns - after.busy_ns - before.ended_ns for before, after in pairwise(run.steps)
    ]
    gaps = [gap for gap in gaps if 0 <= gap < usual_ns]  # a longer one is an idle host
    return msgspec.structs.replace(
        base,
        name=name,
        source=f"{len(steps)} steps of {run.header.host}",
        encode=EncodeCost(item_ns=item_ns, token_ns=token_ns, token_pair_ns=token_pair_ns),
        generate=GenerateCost(
            step_ns=step_ns,
            decode_ns=decode_ns,
            context_ns=context_ns,
            prefill_ns=prefill_ns,
            pair_ns=pair_ns,
        ),
        host=HostCost(
            gap_ns=statistics.fmean(gaps) if gaps else 0.0,
            request_ns=request_ns,
            token_ns=prompt_token_ns,
            depth=run.header.depth,
        ),
        kv_tokens=run.header.kv_tokens,
        encode_error=None,
        generate_error=error,
        noise=0.0,
        machine=None,
    )


def simulated_settings(run: HostRunFile) -> list[str]:
    """Return the assignments of `--set` with which a simulation has the limits of the host."""
    header = run.header
    settings = {
        "slots": header.slots,
        "max_batch_tokens": header.batch_tokens,
        "chunk_tokens": header.batch_tokens,
        "block_size": header.block_size,
        "step_target_ms": f"{header.step_target_ms:g}",
        "prefill_target_ms": f"{header.prefill_target_ms:g}",
        "step.use": "in-order",
        "prefix_cache": str(header.prefix_cache).lower(),
    }
    sets = [f"generate.{key}={value}" for key, value in settings.items()]
    if any(one.images for one in run.steps):
        sets.append("placement=together")
    return sets


def _preparation(run: HostRunFile) -> tuple[float, float]:
    """Return the time of preparing a request, and of each of its prompt tokens."""
    requests = [one for one in run.requests if one.prepared_ns > 0]
    if not requests:
        return 0.0, 0.0
    rows = [(1.0, one.prompt_tokens) for one in requests]
    (request_ns, token_ns), _ = fit_linear(rows, [one.prepared_ns for one in requests])
    return request_ns, token_ns
