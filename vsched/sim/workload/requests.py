"""Workloads: arriving requests, described by the sizes and identities of their contents.

No real text is needed: the scheduler sees a prompt's length, its images, and which parts of it are
equal to parts seen before. So a prompt is a sequence of parts, and equal parts become equal token
ids: a text is identified by a number, an image by a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.errors import ConfigError
from vsched.kernel import SchedulerLimits
from vsched.plain_values import InvalidValue, plain_struct
from vsched.policy import PositiveCount
from vsched.types import Extent, MediaItem, ModelInfo, Request, SamplingParams

OUTPUT_TOKEN = 3
"""The only token that simulated ranks yield; replies repeated in later prompts consist of it."""
TEXT_BITS = 30
_TEXT_MASK = (1 << TEXT_BITS) - 1


class Text(msgspec.Struct, frozen=True, tag="text", tag_field="kind"):
    """The first `tokens` tokens of a text; of two texts with the same `content`, one is a prefix of the other."""

    content: int
    tokens: PositiveCount


class Image(msgspec.Struct, frozen=True, tag="image", tag_field="kind"):
    """An image; images with equal keys are the same."""

    key: str
    tokens: PositiveCount


class Video(msgspec.Struct, frozen=True, tag="video", tag_field="kind"):
    """A video of `groups` frame groups; of two with the same `key`, one is the beginning of the other."""

    key: str
    groups: PositiveCount
    group_tokens: PositiveCount

    @property
    def tokens(self) -> int:
        """Tokens of all groups."""
        return self.groups * self.group_tokens

    @property
    def images(self) -> list[Image]:
        """The groups, each of which is encoded and cached as an image."""
        return [Image(f"{self.key}/{index}", self.group_tokens) for index in range(self.groups)]


class Reply(msgspec.Struct, frozen=True, tag="reply", tag_field="kind"):
    """The first `tokens` tokens of the model's previous output in the conversation."""

    tokens: PositiveCount


PromptPart = Text | Image | Video | Reply


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request, as a client sends it; also one line of a trace in vsched's format.

    Attributes:
        at_ns: When it is sent, from the start of the workload.
        output_tokens: Number of tokens that the model will generate.
        conversation: Turns of one conversation run one after another: each is sent at `at_ns` or
            `think_ns` after the end of the previous turn, whichever is later. Empty for none.
        tenant: Its tenant (`Request.tenant`).
        adapter: Name of a loaded adapter; empty for none.
        max_tokens: Output limit that its client sent; None for `output_tokens`.
        leaves_ns: When its client disconnects, from sending; None if it stays.
        cache_salt: Requests with different salts share nothing (`Request.cache_salt`); None for the
            tenant.
    """

    at_ns: Annotated[int, Meta(ge=0)]
    request_id: str
    prompt: tuple[PromptPart, ...]
    output_tokens: PositiveCount
    conversation: str = ""
    think_ns: Annotated[int, Meta(ge=0)] = 0
    tenant: str = ""
    adapter: str = ""
    priority: int = 0
    ttft_target_ms: Annotated[int, Meta(ge=0)] | None = None
    max_tokens: PositiveCount | None = None
    leaves_ns: Annotated[int, Meta(ge=0)] | None = None
    cache_salt: str | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(part.tokens for part in self.prompt)

    @property
    def media(self) -> list[Image | Video]:
        """The images and videos, in prompt order."""
        return [part for part in self.prompt if type(part) is Image or type(part) is Video]

    @property
    def images(self) -> list[Image]:
        """The images and the frame groups of videos, in prompt order."""
        return [image for part in self.media for image in images_of(part)]

    @property
    def outputs_max(self) -> int:
        """Output limit of the request."""
        return max(self.max_tokens or 0, self.output_tokens)

    @property
    def salt(self) -> str:
        """Its cache salt."""
        return self.tenant if self.cache_salt is None else self.cache_salt

    def scaled_down(self, tokens_max: int) -> Arrival:
        """Return the arrival with at most `tokens_max` tokens per image and per frame group."""

        def fitted(part: PromptPart) -> PromptPart:
            if isinstance(part, Image):
                return Image(part.key, min(part.tokens, tokens_max))
            if isinstance(part, Video):
                return Video(part.key, part.groups, min(part.group_tokens, tokens_max))
            return part

        return msgspec.structs.replace(self, prompt=tuple(map(fitted, self.prompt)))

    def key_of(self, image: Image) -> str:
        """Return the key of one of its images; keys differ between cache salts."""
        return f"{self.salt}/{image.key}" if self.salt else image.key


def images_of(part: Image | Video) -> list[Image]:
    """Return an image, or the frame groups of a video."""
    return part.images if isinstance(part, Video) else [part]


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order of `at_ns`, which can be iterated any number of times.

    Attributes:
        open: Returns a new iterator; nothing is stored, so a workload may have any length.
        requests: Number of requests; None if unknown.
        notes: Notes for readers, such as skipped rows of a trace.
    """

    name: str
    open: Callable[[], Iterator[Arrival]]
    requests: int | None = None
    notes: tuple[str, ...] = field(default=())

    def __iter__(self) -> Iterator[Arrival]:
        return self.open()

    def __repr__(self) -> str:
        """Return a line with the notes."""
        count = "" if self.requests is None else f" of {self.requests:,} requests"
        return f"<Workload {self.name!r}{count}{''.join(f'; {note}' for note in self.notes)}>"

    def first(self, requests: int) -> Workload:
        """Return its first requests only."""
        count = requests if self.requests is None else min(requests, self.requests)
        return Workload(self.name, lambda: islice(self.open(), requests), count, self.notes)

    def faster(self, factor: float) -> Workload:
        """Return the same requests from clients that send, and think, `factor` times as fast.

        Raises:
            ConfigError: When the factor is not a number above 0.
        """
        if not 0 < factor < math.inf:
            raise ConfigError.of_limit(
                "--speed: no speed-up",
                value=factor,
                limit="a number above 0",
                remedy="give 1 for the original times",
            )

        def scaled() -> Iterator[Arrival]:
            for arrival in self.open():
                yield msgspec.structs.replace(
                    arrival,
                    at_ns=int(arrival.at_ns / factor),
                    think_ns=int(arrival.think_ns / factor),
                )

        return Workload(f"{self.name} x{factor:g}", scaled, self.requests, self.notes)


def workload_of(name: str, arrivals: Iterable[Arrival]) -> Workload:
    """Return a workload of these arrivals, which are copied and converted to their declared types; see `plain_value`.

    Raises:
        ConfigError: When a value has the wrong type or is out of bounds.
    """
    try:
        plain = [
            plain_struct(arrival, Arrival, path=f"arrivals[{index}]")
            for index, arrival in enumerate(arrivals)
        ]
    except InvalidValue as error:
        raise ConfigError(error.message("pass a value of this type, within its bounds")) from None
    kept = sorted(plain, key=lambda arrival: arrival.at_ns)
    return Workload(name, lambda: iter(kept), len(kept))


class RequestMaker:
    """Converts arrivals to the requests that an engine would submit for them."""

    def __init__(
        self,
        info: ModelInfo,
        limits: SchedulerLimits,
        *,
        bytes_per_token: int,
        item_tokens_max: int,
        adapted_images: bool = False,
    ) -> None:
        """Prepare for a model.

        Args:
            info: The model's shape.
            limits: Those of the scheduler, of which context and KV cache limit outputs.
            bytes_per_token: Encoder input bytes per image token.
            item_tokens_max: Maximum tokens of an image; larger images are scaled down to it, as in
                a server.
            adapted_images: Whether adapters change the encoding of images, so that each has its own
                embeddings.
        """
        self._info, self._limits = info, limits
        self._adapted_images = adapted_images
        self._adapters: dict[str, int] = {"": 0}
        self._bytes_per_token = bytes_per_token
        self._item_tokens_max = item_tokens_max
        self.scaled_down = 0

    def pixel_bytes(self, image: Image) -> int:
        """Return the size of an image's encoder input."""
        return min(image.tokens, self._item_tokens_max) * self._bytes_per_token

    def request(self, arrival: Arrival) -> Request:
        """Return the request of an arrival."""
        tokens: list[int] = []
        items: list[MediaItem] = []
        adapter = self._adapters.setdefault(arrival.adapter, len(self._adapters))
        seen_with = adapter if self._adapted_images else 0
        for part in arrival.prompt:
            if isinstance(part, Text):
                tokens += text_tokens(part)
            elif isinstance(part, Reply):
                tokens += [OUTPUT_TOKEN] * part.tokens
            else:
                for image in images_of(part):
                    items.append(self._item(image, len(tokens), arrival.key_of(image), seen_with))
                    tokens += [self._info.placeholder] * items[-1].tokens
        outputs_max = self._limits.outputs_max(len(tokens), arrival.outputs_max)
        return Request(
            request_id=arrival.request_id,
            prompt_token_ids=tokens,
            items=tuple(items),
            sampling=SamplingParams(max_tokens=outputs_max, ignore_eos=True),
            priority=arrival.priority,
            ttft_target_ms=arrival.ttft_target_ms,
            cache_salt=arrival.salt,
            session=arrival.conversation,
            tenant=arrival.tenant,
            adapter=adapter,
        )

    def _item(self, image: Image, offset: int, key: str, adapter: int) -> MediaItem:
        count = min(image.tokens, self._item_tokens_max)
        self.scaled_down += count < image.tokens
        return MediaItem(
            key=blake2b(
                key.encode(), digest_size=32, salt=adapter.to_bytes(8, "little") if adapter else b""
            ).digest(),
            tokens=count,
            offset=offset,
            extent=Extent(0, count * self._bytes_per_token),
            adapter=adapter,
        )


def text_tokens(text: Text) -> list[int]:
    """Return token ids that identify a text and the position in it.

    They are not ids of a vocabulary: the scheduler only compares them. The first two hold the
    number of the text, so that different texts have different first blocks; the others count.
    """
    low, high = text.content & _TEXT_MASK, (text.content >> TEXT_BITS) & _TEXT_MASK
    if text.tokens <= 2:
        return [low, high][: text.tokens]
    return [low, high, *range(4, text.tokens + 2)]
