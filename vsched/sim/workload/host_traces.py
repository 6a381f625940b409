"""The trace of a run in another host of policies: arrivals for `vsched simulate --trace`, and measured times.

Prompts are described by the hashes of their KV blocks, so that shared beginnings stay shared in a simulation. Next to
the trace, a file of the same name with `.run` has the times of requests and steps, to fit a cost model to them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from vsched.errors import ConfigError
from vsched.policy.measured import StepTime
from vsched.policy_host import HostedRequest
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
        self._sent_ns: dict[int, tuple[int, int]] = {}
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
        self._sent_ns[number] = self._last_ns, now_ns - request.arrived_ns

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
        at_ns, prepared_ns = self._sent_ns.pop(number)
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
            self._open[number] = self._arrival(name, at_ns, request, parts)
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
        self, name: str, at_ns: int, one: HostedRequest, parts: tuple[PromptPart, ...]
    ) -> Arrival:
        wait_ns = None if one.target_ns is None else max(one.target_ns - one.arrived_ns, 0)
        return Arrival(
            at_ns=at_ns,
            request_id=name,
            prompt=parts,
            output_tokens=one.output_tokens,
            conversation=one.session,
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
