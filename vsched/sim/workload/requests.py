"""Workloads: requests as they arrive, described by the sizes and the identities of what they hold.

Nobody's words are needed: what the scheduler sees of a prompt is its length, its images, and what of it is equal to
something that it saw before. So a prompt is a sequence of parts, and equal parts become equal token ids: a text is
known by a number, an image by a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.errors import ConfigError
from vsched.plain_values import InvalidValue, plain_struct
from vsched.policy import PositiveCount
from vsched.types import Extent, MediaItem, ModelInfo, Request, SamplingParams

OUTPUT_TOKEN = 3
"""The one token that simulated ranks yield; replies that come back in later prompts consist of it."""
TEXT_BITS = 30
_TEXT_MASK = (1 << TEXT_BITS) - 1


class Text(msgspec.Struct, frozen=True, tag="text", tag_field="kind"):
    """The first `tokens` tokens of a text; of two texts with the same `content`, one is a beginning of the other."""

    content: int
    tokens: PositiveCount


class Image(msgspec.Struct, frozen=True, tag="image", tag_field="kind"):
    """An image; images with equal keys are the same."""

    key: str
    tokens: PositiveCount


class Reply(msgspec.Struct, frozen=True, tag="reply", tag_field="kind"):
    """The first `tokens` tokens of what the model answered earlier in the conversation."""

    tokens: PositiveCount


PromptPart = Text | Image | Reply


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request, as a client sends it; also a line of a trace of our own.

    Attributes:
        at_ns: When it is sent, since the start of the workload.
        output_tokens: Tokens that the model will answer with.
        conversation: Turns of one conversation go one after the other: each is sent at `at_ns` or `think_ns` after the
            end of the turn before, whichever is later. Empty for none.
        tenant: Whose it is (`Request.tenant`); requests of different tenants share nothing (`Request.cache_salt`).
        adapter: The name of its adapter, empty for none; every name is one that is loaded.
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

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(part.tokens for part in self.prompt)

    @property
    def images(self) -> list[Image]:
        """The images, in prompt order."""
        return [part for part in self.prompt if type(part) is Image]

    def key_of(self, image: Image) -> str:
        """Return what its images are known by: tenants share nothing."""
        return f"{self.tenant}/{image.key}" if self.tenant else image.key


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order of `at_ns`, which can be gone through any number of times.

    Attributes:
        open: Returns a fresh iterator; nothing is kept, so a workload may be of any length.
        requests: How many there are; None for unknown.
        notes: What a reader should know, such as rows of a trace that were left out.
    """

    name: str
    open: Callable[[], Iterator[Arrival]]
    requests: int | None = None
    notes: tuple[str, ...] = field(default=())

    def __iter__(self) -> Iterator[Arrival]:
        return self.open()

    def first(self, requests: int) -> Workload:
        """Return its first requests only."""
        count = requests if self.requests is None else min(requests, self.requests)
        return Workload(self.name, lambda: islice(self.open(), requests), count, self.notes)

    def faster(self, factor: float) -> Workload:
        """Return the same requests, arriving `factor` times as fast."""

        def scaled() -> Iterator[Arrival]:
            for arrival in self.open():
                yield msgspec.structs.replace(arrival, at_ns=int(arrival.at_ns / factor))

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
    """Turns arrivals into the requests that an engine would submit for them."""

    def __init__(
        self,
        info: ModelInfo,
        *,
        bytes_per_token: int,
        item_tokens_max: int,
        adapted_images: bool = False,
    ) -> None:
        """Prepare for a model.

        Args:
            info: Its shape.
            bytes_per_token: Of an image, ready for the encoder.
            item_tokens_max: Images of more tokens are scaled down to it, as a server does.
            adapted_images: Whether adapters change how images are encoded, so that each has embeddings of its own.
        """
        self._info = info
        self._adapted_images = adapted_images
        self._adapters: dict[str, int] = {"": 0}
        self._bytes_per_token = bytes_per_token
        self._item_tokens_max = item_tokens_max
        self.scaled_down = 0

    def pixel_bytes(self, image: Image) -> int:
        """Return the bytes of an image, ready for the encoder."""
        return min(image.tokens, self._item_tokens_max) * self._bytes_per_token

    def request(self, arrival: Arrival) -> Request:
        """Return the request of an arrival."""
        tokens: list[int] = []
        items: list[MediaItem] = []
        adapter = self._adapters.setdefault(arrival.adapter, len(self._adapters))
        seen_with = adapter if self._adapted_images else 0
        for part in arrival.prompt:
            if type(part) is Text:
                tokens += text_tokens(part)
            elif type(part) is Image:
                items.append(self._item(part, len(tokens), arrival.key_of(part), seen_with))
                tokens += [self._info.placeholder] * items[-1].tokens
            else:
                tokens += [OUTPUT_TOKEN] * part.tokens
        return Request(
            request_id=arrival.request_id,
            prompt_token_ids=tokens,
            items=tuple(items),
            sampling=SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True),
            priority=arrival.priority,
            ttft_target_ms=arrival.ttft_target_ms,
            cache_salt=arrival.tenant,
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
    """Return token ids that say which text it is and how far into it they are.

    They are no tokens of a vocabulary: the scheduler only compares them. The first two hold the number of the text, so
    that no two texts begin alike; the others count.
    """
    low, high = text.content & _TEXT_MASK, (text.content >> TEXT_BITS) & _TEXT_MASK
    if text.tokens <= 2:
        return [low, high][: text.tokens]
    return [low, high, *range(4, text.tokens + 2)]
