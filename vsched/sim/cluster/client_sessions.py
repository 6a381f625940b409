"""Simulated clients: each sends one request, over HTTP or the library API, and checks the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from vsched.engine import Engine
from vsched.errors import RequestFailed, RequestRefused
from vsched.kernel import Scheduler
from vsched.kernel.encode.embedding_cache import EntryPhase
from vsched.kernel.request import Phase as KernelPhase
from vsched.media import MediaReference
from vsched.sim.faults import RequestPhase
from vsched.sim.network.asgi_client import AsgiClient, Disconnected, HttpCall
from vsched.sim.ranks.symbolic_model import (
    GROUP_FRAMES,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    answer,
    frame_group_key,
    image_tokens,
    root_of,
    video_tokens,
)
from vsched.sim.workload import images
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Text, Video, text_tokens
from vsched.sim.world import World
from vsched.types import MediaItem, Request, SamplingParams, Spans
from vsched.worker.expansion import runs_of

PHASES: dict[KernelPhase, RequestPhase] = {
    KernelPhase.ITEMS: "encode",
    KernelPhase.READY: "wait",
    KernelPhase.PREEMPTED: "wait",
    KernelPhase.SUSPENDED: "wait",
    KernelPhase.PROMPT: "wait",
    KernelPhase.PREFILL: "prefill",
    KernelPhase.DECODE: "decode",
}
TENANT_HEADER = "x-tenant"
UPLOAD_PIECES = 3
UPLOAD_PAUSE_S = 0.02
FIRST_SEED = 1 << 40
"""Sampling seed of the first session, by which its request is known; requests of a test have smaller ones."""
SessionOutcome = Literal["", "finished", "refused", "failed", "left"]


class ClientBehaviour(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of a client: HTTP or library API, streaming or not, images inline or as URLs.

    `stop_token_ids` and `stop` end the output at their first occurrence. With `choices` the output
    must be one of them, or a prefix of one. `answers` is the number of choices requested (`n`),
    which share the prompt and are all equal.
    """

    http: bool = True
    stream: bool = True
    slow_upload: bool = False
    remote: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    answers: int = 1

    @property
    def choice(self) -> list[str]:
        """The `choices` as texts."""
        return [" ".join(map(str, each)) for each in self.choices]


class SessionAnswer(msgspec.Struct):
    """One choice of a response; `reason` is its finish reason, empty until it ends."""

    text: str = ""
    tokens: list[int] = []
    reason: str = ""


class ClientSession:
    """One client request and its outcome.

    Attributes:
        arrival: The request to send.
        answers: The choices received so far; over HTTP without token ids.
        outcome: Empty until the request ends.
        code: Error code, if it ended with an error.
        number: The kernel's request number, once accepted.
        adapter: The kernel's number of its adapter; 0 for none.
    """

    def __init__(
        self, world: World, index: int, arrival: Arrival, behaviour: ClientBehaviour
    ) -> None:
        self.arrival = arrival
        self.adapter = 0
        self.behaviour = behaviour
        self.index = index
        self.answers = [SessionAnswer() for _ in range(behaviour.answers)]
        self.outcome: SessionOutcome = ""
        self.code = ""
        self.message = ""
        self.number: int | None = None
        self.sent_ns = -1
        self.first_ns = -1
        self.ended_ns = -1
        self.done = asyncio.Event()
        self._world = world
        self._request: Request | None = None
        self._uploading = False
        self._left = False
        self._call: HttpCall | None = None
        self._task: asyncio.Task[None] | None = None
        self.prompt: list[int] = []
        self.items: list[MediaItem] = []
        self._parts = [self._put(part) for part in arrival.prompt]

    def _put(self, part: PromptPart) -> Image | Video | list[int]:
        """Append a part to the expected prompt, and return the part as sent by the client."""
        salt = self.arrival.salt
        if isinstance(part, Image):
            expansion = image_tokens(part.tokens)
            spans = runs_of(expansion, IMAGE_TOKEN, len(self.prompt))
            self._put_item(part, images.key_of(part, salt), spans)
            self.prompt += expansion
            return part
        if isinstance(part, Video):
            expansion = video_tokens(part.groups, part.group_tokens)
            spans = runs_of(expansion, VIDEO_TOKEN, len(self.prompt))
            for image, span in zip(part.images, spans, strict=True):
                self._put_item(image, frame_group_key(images.appearance_of(image), salt), (span,))
            self.prompt += expansion
            return part
        tokens = (
            text_tokens(part)
            if isinstance(part, Text)
            else answer(self.prompt, self.items, part.tokens)
        )
        self.prompt += tokens
        return tokens

    def _put_item(self, image: Image, key: bytes, spans: Spans) -> None:
        self._world.appearances[key] = images.appearance_of(image)
        item = MediaItem(key=key, tokens=image.tokens, offset=spans[0][0], spans=spans)
        self.items.append(item)

    @property
    def received(self) -> SessionAnswer:
        """The first choice received so far."""
        return self.answers[0]

    @property
    def expected(self) -> SessionAnswer:
        """The correct output."""
        received = SessionAnswer(reason="length")
        count, choices = self.arrival.output_tokens, self.behaviour.choices
        root = root_of(self.adapter)
        for token in answer(self.prompt, self.items, count, root=root, choices=choices):
            received.tokens.append(token)
            if token in self.behaviour.stop_token_ids:
                received.reason = "stop"  # not part of the text
                break
            received.text += f"{token} "
            ends = [
                (place + len(stop), place)
                for stop in self.behaviour.stop
                if (place := received.text.find(stop)) >= 0
            ]
            if ends:
                received.text, received.reason = received.text[: min(ends)[1]], "stop"
                break
            if tuple(received.tokens) in choices:
                received.reason = "stop"  # generation must end here
        return received

    def accepted(self, number: int, request: Request) -> None:
        """Check that the kernel accepted this request unchanged."""
        self.number, self._request = number, request
        same = request.prompt_token_ids == self.prompt and len(request.items) == len(self.items)
        same = same and request.adapter == self.adapter
        named = self.arrival.tenant, self.arrival.conversation
        same = same and (request.tenant, request.session) == named
        for item, expected in zip(request.items, self.items, strict=False):
            same = same and (item.key, item.runs) == (expected.key, expected.runs)
        self._world.expect(same, f"{self}: it was accepted as something else")

    def phase(self, kernel: Scheduler | None) -> RequestPhase | None:
        """Return the current phase; None before sending and after the end."""
        if self.sent_ns < 0 or self.outcome or self._left:
            return None
        if self._uploading:
            return "upload"
        if self._request is None:
            return "prepare"
        phase = kernel.phase(self._request.request_id) if kernel is not None else None
        if phase is None or kernel is None:
            return None
        claimed = [entry for entry in kernel.embeddings if self.number in entry.claims]
        ready = all(entry.phase is EntryPhase.READY for entry in claimed)
        return PHASES[phase] if ready else "encode"

    def leave(self) -> None:
        """Disconnect."""
        self._left = True
        if self._call is not None:
            self._call.disconnect()
        elif self._task is not None:
            self._task.cancel()

    async def send_request(self, engine: Engine, client: AsgiClient) -> None:
        """Send the request and read the response to its end."""
        loop = self._world.loop
        self.sent_ns = loop.now_ns()
        ask = self._over_http(client) if self.behaviour.http else self._as_library(engine)
        self._task = loop.create_task(ask)
        leaves_ns = self.arrival.leaves_ns
        if leaves_ns is not None:
            patience = loop.call_at_ns(self.sent_ns + leaves_ns, self.leave)
            self._task.add_done_callback(lambda _: patience.cancel())
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            raise
        self.ended_ns = loop.now_ns()
        error = None if self._task.cancelled() else self._task.exception()
        if self._task.cancelled() or isinstance(error, Disconnected):
            self._set_outcome("left")
        elif isinstance(error, RequestRefused):
            self._set_outcome("refused", error)
        elif isinstance(error, RequestFailed):
            self._set_outcome("failed", error)
        elif error is not None:
            self._world.violate(f"{self}: {error!r}")
            self._set_outcome("failed")
        self._check()
        self.done.set()

    def _set_outcome(
        self, outcome: SessionOutcome, error: RequestRefused | RequestFailed | None = None
    ) -> None:
        self.outcome = outcome
        if error is not None:
            self.code, self.message = error.code or "", error.message

    def _check(self) -> None:
        """Check that no output is missing, duplicated or wrong."""
        expected = self.expected
        for one in self.answers:
            if self.outcome == "finished":
                same = (one.text, one.reason) == (expected.text, expected.reason)
                same = same and (self.behaviour.http or one.tokens == expected.tokens)
            else:
                same = expected.text.startswith(one.text)
                same = same and one.tokens == expected.tokens[: len(one.tokens)]
            self._world.expect(same, f"{self}: received {one} instead of {expected}")
        if self.outcome == "left":
            self._world.expect(self._left, f"{self}: it was left alone")

    def __str__(self) -> str:
        """Return the request's name for messages."""
        return f"request {self.index} ({self.arrival.request_id})"

    # --- as a library ---

    async def _as_library(self, engine: Engine) -> None:
        arrival = self.arrival
        prompt: list[int] = []
        for part in self._parts:
            if isinstance(part, list):
                prompt += part
            else:
                prompt.append(IMAGE_TOKEN if isinstance(part, Image) else VIDEO_TOKEN)
        name = f"library-{self.index}"
        generations = await engine.generate_choices(
            prompt=prompt,
            images=[self._reference(part) for part in arrival.media],
            sampling=SamplingParams(
                max_tokens=arrival.output_tokens,
                temperature=0.0,
                seed=FIRST_SEED + self.index,
                stop_token_ids=self.behaviour.stop_token_ids,
                stop=self.behaviour.stop,
                grammar=self._grammar,
            ),
            request_ids=[f"{name}#{one}" if one else name for one in range(len(self.answers))],
            priority=arrival.priority,
            ttft_target_ms=arrival.ttft_target_ms,
            cache_salt=arrival.salt,
            tenant=arrival.tenant,
            session=arrival.conversation,
            adapter=arrival.adapter,
        )
        try:
            for index, generation in enumerate(generations):
                async for delta in generation:
                    self.answers[index].tokens += delta.token_ids
                    self._receive(index, delta.text, delta.finish_reason)
        finally:
            for generation in generations:
                generation.abort()

    @property
    def _grammar(self) -> str:
        choice = self.behaviour.choice
        return msgspec.json.encode({"choice": choice}).decode() if choice else ""

    def _receive(self, index: int, text: str | None, reason: str | None) -> None:
        received = self.answers[index]
        if text and self.first_ns < 0:
            self.first_ns = self._world.loop.now_ns()
        self._world.expect(not received.reason, f"{self}: choice {index} continued after its end")
        received.text += text or ""
        if reason is not None:
            received.reason = reason
            if all(one.reason for one in self.answers):
                self.outcome = "finished"

    def _reference(self, part: Image | Video) -> str | MediaReference:
        if isinstance(part, Image):
            return self._url(part)
        return MediaReference(self._frames(part), is_video=True)

    def _frames(self, video: Video) -> tuple[str, ...]:
        """Return the URLs of all frames; those of a group are equal."""
        return tuple(url for image in video.images for url in [self._url(image)] * GROUP_FRAMES)

    def _url(self, image: Image) -> str:
        return images.remote_url(image) if self.behaviour.remote else images.data_url(image)

    # --- over HTTP ---

    async def _over_http(self, client: AsgiClient) -> None:
        body, tenant = self._body(), self.arrival.tenant
        headers = [(TENANT_HEADER, tenant)] if tenant else []
        if self.behaviour.slow_upload:
            pieces = self._upload(msgspec.json.encode(body))
            headers.append(("content-type", "application/json"))
            call = client.open("POST", "/v1/chat/completions", pieces=pieces, headers=headers)
        else:
            call = client.open("POST", "/v1/chat/completions", json=body, headers=headers)
        async with call:
            self._call = call
            if await call.started() != 200:
                raise _error_of(await call.response())
            await (self._read_stream(call) if self.behaviour.stream else self._read_whole(call))

    async def _upload(self, body: bytes) -> AsyncIterator[bytes]:
        self._uploading = True
        size = -(-len(body) // UPLOAD_PIECES)
        for start in range(0, len(body), size):
            yield body[start : start + size]
            await asyncio.sleep(UPLOAD_PAUSE_S)
        self._uploading = False

    async def _read_stream(self, call: HttpCall) -> None:
        async for data in call.events():
            if data == "[DONE]":
                continue
            received = msgspec.json.decode(data)
            if "error" in received:
                raise RequestFailed(received["error"]["message"], code=received["error"]["code"])
            for choice in received["choices"]:
                delta, reason = choice["delta"], choice["finish_reason"]
                self._receive(choice["index"], delta.get("content"), reason)

    async def _read_whole(self, call: HttpCall) -> None:
        for choice in (await call.response()).json()["choices"]:
            content = choice["message"]["content"]
            self._receive(choice["index"], content, choice["finish_reason"])

    def _body(self) -> dict[str, Any]:
        arrival = self.arrival
        content: list[dict[str, Any]] = []
        for part in self._parts:
            if isinstance(part, Image):
                content.append({"type": "image_url", "image_url": {"url": self._url(part)}})
            elif isinstance(part, Video):
                content.append({"type": "video", "video": self._frames(part)})
            else:
                content.append({"type": "text", "text": " ".join(map(str, part))})
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": arrival.output_tokens,
            "temperature": 0,
            "seed": FIRST_SEED + self.index,
            "stream": self.behaviour.stream,
            "priority": arrival.priority,
            "stop_token_ids": self.behaviour.stop_token_ids,
            "stop": self.behaviour.stop,
            "n": self.behaviour.answers,
        }
        if self.behaviour.choices:
            body["structured_outputs"] = {"choice": self.behaviour.choice}
        if arrival.adapter:
            body["model"] = arrival.adapter
        if arrival.salt:
            body["cache_salt"] = arrival.salt
        if arrival.conversation:
            body["prompt_cache_key"] = arrival.conversation
        if arrival.ttft_target_ms:
            body["ttft_target_ms"] = arrival.ttft_target_ms
        return body


def _error_of(response: Any) -> Exception:
    error = response.json()["error"]
    if response.status == 500:
        return RequestFailed(error["message"], code=error["code"])
    return RequestRefused(error["message"], code=error["code"], status=response.status)
