"""The nouns that every part of vsched shares: requests, items, sampling parameters, model facts.

All are immutable msgspec structs, so that they travel over a wire and into a log exactly as they are in memory.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when it ends.

    `logit_bias` are pairs of a token and what is added to its logit. `bad_words` are sequences of tokens that are not
    generated: the last token of one is forbidden where the others came just before.

    `temperature=0` is greedy. `seed` fixes the random draws: each draw depends on (seed, position) only, never on the
    batch around it. `stop_token_ids` ends a request when such a token is sampled; the checkpoint's own end tokens are
    added unless `ignore_eos`. `include_stop` leaves what ended a request in its text, `show_special` special tokens.
    `logprobs` is the number of alternatives to report a token, None for none at all, and `prompt_logprobs` that for the
    tokens of the prompt. `prompt_only` is that nothing is generated: the request ends with its prompt.

    `grammar` is what the output must match, as `vsched.worker.capabilities.Grammars` takes it; empty for anything.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    show_special: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that came before change logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the argmax of the raw logits is the answer, but where `min_tokens` forbids a stop token."""
        return (
            self.temperature == 0.0
            and not self.has_penalty
            and self.logprobs is None
            and not self.logit_bias
            and not self.bad_words
            and not self.grammar
        )


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A byte range of the arena's pixel region."""

    offset: int
    size: int


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """One array that an encoder reads of an item; `dtype` is numpy's name of a number, such as `float32`.

    The arrays of an item lie one after the other in its extent, and each begins at a multiple of `ARENA_ALIGNMENT`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        bits = re.fullmatch(r"(?:u?int|float)(8|16|32|64)", self.dtype)
        assert bits or self.dtype == "bool", f"the array {self.name!r} has the dtype {self.dtype!r}"
        return math.prod(self.shape) * (int(bits[1]) // 8 if bits else 1)


Spans = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of positions in a prompt, ascending, that do not touch."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a request.

    Attributes:
        key: 32-byte digest over content, shape, dtype and processor settings: equal content, equal key.
        tokens: Encoder output tokens after the spatial merge; also the placeholders it fills in the prompt.
        offset: Index of its first placeholder in the prompt.
        spans: Where its placeholders lie if other tokens stand between them, as after each row of an image; empty where
            they are one run.
        arrays: What the encoder reads of it, in the order in which it lies in `extent`.
        metadata: What the plug-in must know of it beside the arrays, for its positions say: a few bytes, which nobody
            else reads.
        extent: Where its arrays lie in the arena.
        encoded: The client brought the embedding itself: `extent` holds its rows, [tokens, row bytes], and no arrays.
        adapter: Number of the adapter that changes how it is encoded, which its key covers, too; 0 for none.
    """

    key: bytes
    tokens: int
    offset: int
    spans: Spans = ()
    arrays: tuple[ArraySpec, ...] = ()
    metadata: bytes = b""
    extent: Extent | None = None
    encoded: bool = False
    adapter: int = 0

    @property
    def end(self) -> int:
        """Index just past its last placeholder."""
        return self.spans[-1][1] if self.spans else self.offset + self.tokens

    @property
    def runs(self) -> Spans:
        """The ranges of positions that its placeholders fill."""
        return self.spans or ((self.offset, self.offset + self.tokens),)


class ItemPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where an item lies in its prompt, and what the plug-in knows of it; attributes as of `MediaItem`."""

    offset: int
    tokens: int
    metadata: bytes = b""
    spans: Spans = ()

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (position, row, rows) of each run of placeholders that positions [start, stop) cover."""
        row = 0
        for first, end in self.spans or ((self.offset, self.offset + self.tokens),):
            covered, past = max(first, start), min(end, stop)
            if covered < past:
                yield covered, row + covered - first, past - covered
            row += end - first


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine submits it to a replica.

    `items` are in prompt order and do not overlap. A larger `priority` is more urgent, and `ttft_target_ms` is when the
    client wants its first token, counted from arrival, for policies that heed them. `cache_salt` separates the prefix
    and embedding caches of tenants. `adapter` is the number of the adapter that it is computed with, 0 for none.
    `tenant` is whose request it is, for policies that share out between tenants; empty where nobody says. `session`
    names the conversation that it is a turn of, where a client or a trace does.
    """

    request_id: str
    prompt_token_ids: list[int]
    items: tuple[MediaItem, ...] = ()
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    ttft_target_ms: int | None = None
    cache_salt: str = ""
    adapter: int = 0
    tenant: str = ""
    session: str = ""


def group_names(stage: str, replicas: int) -> list[str]:
    """Return the names of the groups of a stage: the stage's own where there is one, else numbered."""
    return [stage] if replicas == 1 else [f"{stage}-{index}" for index in range(replicas)]


def replica_of(group: str) -> int:
    """Return the number of a group among those of its stage."""
    number = group.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def stage_of(group: str) -> str:
    """Return the stage, `encode` or `generate`, of a group."""
    return group.partition("-")[0]


class FinishReason(enum.StrEnum):
    """Why a request ended; the first two are what OpenAI clients know."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that says nothing of them gets: of `SamplingParams`, those that checkpoints state."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


KV_SCALE_BYTES = 2
"""Bytes of the scale, a bfloat16, of a head of K or V that is kept in 8 bits."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the system must know of a checkpoint without loading it.

    Attributes:
        family: The model family's name, such as `qwen2_5_vl`.
        dtype: `float32`, `bfloat16` or `float16`: weights and embeddings alike, and the KV cache unless `kv_dtype` says
            otherwise.
        embedding_levels: Rows that the encoder yields a token: 1, plus one for each deepstack level.
        kv_bytes_per_token: Bytes of K and V of one token over all layers.
        kv_heads_per_token: Heads of K and of V of one token over all layers; 0 where they cannot be kept in 8 bits.
        kv_dtype: `int8` where the KV cache has K and V in 8 bits, with a scale for each head of a token; or `auto`.
        shares_kv: Of several ranks each has a part of them, and not all.
        state_bytes: Bytes of what layers keep of a sequence besides, however long it is; 0 where they keep nothing.
            Such a state is of the last token alone, so the blocks of an earlier request are of no use without it.
        item_tokens_max: Most tokens that one image may have after the clamp.
        item_atomic: The positions of an image see each other, so that one chunk must hold the whole image; of one that
            fills several runs, those of each run.
        prompt_atomic: All positions of a prompt see each other, so that one chunk must hold the whole prompt.
        image_token_id: The placeholder of an image; None for a model of text alone, whose figures of images are 0.
        stop_token_ids: End-of-sequence tokens of the checkpoint.
        sampling: What its `generation_config.json` states, or nothing where the configuration says so.
        chat_template: Name or file of the chat template to use; empty for the checkpoint's default.
        draft: The facts of the model that drafts for it, where there is one.
    """

    family: str
    path: str
    dtype: str
    hidden_size: int
    embedding_levels: int = 0
    vocab_size: int
    context_tokens: int
    kv_bytes_per_token: int
    kv_heads_per_token: int = 0
    kv_dtype: str = "auto"
    shares_kv: bool = True
    state_bytes: int = 0
    item_tokens_max: int = 0
    item_atomic: bool = False
    prompt_atomic: bool = False
    image_token_id: int | None = None
    stop_token_ids: tuple[int, ...]
    sampling: SamplingDefaults = SamplingDefaults()
    chat_template: str = ""
    draft: ModelInfo | None = None

    @property
    def takes_images(self) -> bool:
        """Whether prompts may hold images."""
        return self.image_token_id is not None

    @property
    def with_int8_kv(self) -> ModelInfo:
        """The same model, its KV cache in 8 bits."""
        assert self.kv_heads_per_token, "it cannot be kept so"
        values = self.kv_bytes_per_token // self.itemsize
        size = values + KV_SCALE_BYTES * self.kv_heads_per_token
        return msgspec.structs.replace(self, kv_dtype="int8", kv_bytes_per_token=size)

    @property
    def text_alone(self) -> ModelInfo:
        """The same model, asked about text alone."""
        return msgspec.structs.replace(
            self, embedding_levels=0, item_tokens_max=0, image_token_id=None
        )

    @property
    def placeholder(self) -> int:
        """The token that stands for an image, of a model that takes images."""
        assert self.image_token_id is not None, "a model of text alone has no placeholder"
        return self.image_token_id

    @property
    def itemsize(self) -> int:
        """Bytes of one value of `dtype`."""
        return 4 if self.dtype == "float32" else 2

    @property
    def embedding_row_bytes(self) -> int:
        """Bytes of one token's embedding, every level included."""
        return self.hidden_size * self.embedding_levels * self.itemsize


ARENA_ALIGNMENT = 64


class ArenaLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where things lie in the shared arena: pixels first, then pages of embedding rows."""

    pixel_bytes: int
    pages: int
    page_rows: int
    row_bytes: int

    @property
    def embedding_offset(self) -> int:
        """First byte of the embedding region."""
        return -(-self.pixel_bytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding region."""
        return self.pages * self.page_rows * self.row_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.embedding_offset + self.embedding_bytes
