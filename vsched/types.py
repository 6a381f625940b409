"""Types shared by all packages: requests, images, sampling parameters, model facts.

All are immutable msgspec structs, so they can be sent and recorded unchanged.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters and end conditions of one request.

    `logit_bias` are pairs of a token and a value to add to its logit. `bad_words` are token sequences that must not be
    generated: the last token of a sequence is forbidden after the others.

    `temperature=0` is greedy. `seed` fixes the random draws: each draw depends only on (seed, position), never on the
    rest of the batch. Without one, the engine draws a seed for each request. `stop_token_ids` end the request when
    sampled; the checkpoint's own end tokens are added unless `ignore_eos` is set. `include_stop` keeps the stop string
    or token in the text, `show_special` keeps special tokens. `logprobs` is the number of alternatives reported per
    output token, None to report nothing; `prompt_logprobs` is the same for prompt tokens. With `prompt_only`, nothing
    is generated: the request ends after its prompt. `grammar` constrains the output, in the format of
    `vsched.worker.contract.Grammars`; empty for no constraint.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
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
        """True if earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def is_plain_greedy(self) -> bool:
        """True if the argmax of the raw logits is the next token, unless `min_tokens` forbids it as a stop token."""
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
    """One input array of the encoder for an image; `dtype` is a numpy name such as `float32`.

    The arrays of an image lie in its extent one after the other, each at a multiple of `ARENA_ALIGNMENT`.
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
"""Ranges [start, stop) of prompt positions, ascending and not adjacent."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a request, or one frame group of a video: the frames that are encoded together.

    All arrays are in one extent: a single allocation that succeeds or fails as a whole, and that ranks read as views,
    without a header to parse. Metadata travels in decisions instead, since generate ranks need it for as long as the
    request can be recomputed, and hold no lease on the arena.

    Attributes:
        key: 32-byte digest over content, shape, dtype and processor settings: equal content, equal key.
        tokens: Encoder output tokens after the spatial merge, which are its rows in the embedding arena. Each has a
            placeholder in the prompt, unless `kept` names fewer.
        offset: Index of its first placeholder in the prompt.
        spans: Ranges of its placeholders if other tokens stand between them, for example after each row of an image;
            empty if they are contiguous.
        kept: Ranges of its rows that have placeholders, if others were pruned; then `spans` is not empty.
        arrays: Inputs of the encoder, in their order in `extent`.
        metadata: Other data for the plug-in, such as the grid size for positions: a few bytes, opaque to vsched.
        extent: Location of its arrays in the arena.
        encoded: The client sent the embedding itself: `extent` holds its rows, [tokens, row bytes], and no arrays.
        adapter: Number of the adapter that is applied when it is encoded, 0 for none; the key covers it as well.
        attention: Ranges of positions with bidirectional attention, for a model with such attention within images; None
            for all placeholders.
    """

    key: bytes
    tokens: int
    offset: int
    spans: Spans = ()
    kept: Spans = ()
    arrays: tuple[ArraySpec, ...] = ()
    metadata: bytes = b""
    extent: Extent | None = None
    encoded: bool = False
    adapter: int = 0
    attention: Spans | None = None

    @property
    def end(self) -> int:
        """Index after its last placeholder."""
        return self.spans[-1][1] if self.spans else self.offset + self.tokens

    @property
    def runs(self) -> Spans:
        """Ranges of positions of its placeholders."""
        return self.spans or ((self.offset, self.offset + self.tokens),)

    @property
    def atoms(self) -> Spans:
        """Ranges that no chunk may cut, in a model with bidirectional attention within images."""
        return self.runs if self.attention is None else self.attention


class ItemPlace(msgspec.Struct, frozen=True, array_like=True):
    """Position of an image in its prompt, and its metadata for the plug-in; attributes as in `MediaItem`."""

    offset: int
    tokens: int
    metadata: bytes = b""
    spans: Spans = ()
    kept: Spans = ()
    attention: Spans | None = None

    @property
    def runs(self) -> Spans:
        """Ranges of positions of its placeholders."""
        return self.spans or ((self.offset, self.offset + self.tokens),)

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (position, row, rows) for each run of placeholders of consecutive rows within [start, stop)."""
        kept = iter(self.kept or ((0, self.tokens),))
        row = row_end = 0
        for first, end in self.runs:
            while first < end:
                if row == row_end:
                    row, row_end = next(kept)
                count = min(end - first, row_end - row)
                covered, past = max(first, start), min(first + count, stop)
                if covered < past:
                    yield covered, row + covered - first, past - covered
                first += count
                row += count


def count_of(spans: Spans) -> int:
    """Return the number of positions, or rows, in ranges."""
    return sum([stop - start for start, stop in spans])


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine submits it to a replica.

    `items` are in prompt order and do not overlap. A larger `priority` is more urgent, and `ttft_target_ms` is the
    client's deadline for the first token, counted from arrival; both are for policies. `cache_salt` separates prefix
    and embedding caches of tenants. `adapter` is the number of the LoRA adapter to apply, 0 for none.

    `tenant` identifies the user, for policies that share capacity between tenants; empty if unknown. `session`
    identifies the conversation that the request is a turn of, if a client or a trace gives one.
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
    """Return the names of a stage's groups: the stage's name if there is only one, otherwise numbered."""
    return [stage] if replicas == 1 else [f"{stage}-{index}" for index in range(replicas)]


def replica_of(group: str) -> int:
    """Return the number of a group within its stage."""
    number = group.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def stage_of(group: str) -> str:
    """Return the stage, `encode` or `generate`, of a group."""
    return group.partition("-")[0]


class FinishReason(enum.StrEnum):
    """Reason that a request ended; OpenAI clients know the first two."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Default sampling parameters from the checkpoint, for requests that do not set them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


KV_SCALE_BYTES = 2
"""Bytes of the bfloat16 scale of one int8 head of K or V."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a checkpoint that are available without loading it.

    Attributes:
        family: Name of the model family, such as `qwen2_5_vl`.
        dtype: `float32`, `bfloat16` or `float16`: of weights, embeddings and, unless `kv_dtype` differs, the KV cache.
        embedding_levels: Encoder output rows per token: 1, plus one for each deepstack level.
        kv_bytes_per_token: Bytes of K and V of one token over all layers.
        kv_heads_per_token: Heads of K and of V of one token over all layers; 0 if int8 is not supported for them.
        kv_dtype: `int8` if the KV cache is quantized with one scale for each head of a token; otherwise `auto`.
        shares_kv: Tensor-parallel ranks split the KV heads between them instead of replicating them.
        vision_bytes: Size of the vision tower's weights in memory if loading does not quantize them; 0 if unknown.
        language_bytes: Likewise of all other weights.
        ties_head: The output projection is the embedding.
        state_bytes: Bytes of recurrent state per sequence, independent of its length; 0 without recurrent layers. The
            state is that of the last token, so cached blocks cannot be reused without a snapshot of it.
        item_tokens_max: Maximum number of tokens of one image after resizing.
        item_atomic: Attention is bidirectional within an image, so one chunk must hold the whole image; for an image of
            several runs, each run.
        prompt_atomic: Attention is bidirectional within the prompt, so one chunk must hold the whole prompt.
        image_token_id: Placeholder token of images; None for a text-only model, whose image sizes are 0.
        video_token_id: Placeholder token of videos; None if the model, or its preprocessing, takes none.
        stop_token_ids: End-of-sequence tokens of the checkpoint.
        sampling: Defaults from `generation_config.json`; neutral values if the configuration disables them.
        chat_template: Name or file of the chat template to use; empty for the checkpoint's default.
        draft: Facts about the draft model, if there is one.
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
    vision_bytes: int = 0
    language_bytes: int = 0
    ties_head: bool = False
    state_bytes: int = 0
    item_tokens_max: int = 0
    item_atomic: bool = False
    prompt_atomic: bool = False
    image_token_id: int | None = None
    video_token_id: int | None = None
    stop_token_ids: tuple[int, ...]
    sampling: SamplingDefaults = SamplingDefaults()
    chat_template: str = ""
    draft: ModelInfo | None = None

    @property
    def takes_images(self) -> bool:
        """True if prompts may contain images."""
        return self.image_token_id is not None

    @property
    def takes_videos(self) -> bool:
        """True if prompts may contain videos."""
        return self.video_token_id is not None

    @property
    def with_int8_kv(self) -> ModelInfo:
        """The same model with an int8 KV cache."""
        assert self.kv_heads_per_token, "it cannot be kept so"
        values = self.kv_bytes_per_token // self.itemsize
        size = values + KV_SCALE_BYTES * self.kv_heads_per_token
        return msgspec.structs.replace(self, kv_dtype="int8", kv_bytes_per_token=size)

    @property
    def text_alone(self) -> ModelInfo:
        """The same model without image input."""
        return msgspec.structs.replace(
            self, embedding_levels=0, item_tokens_max=0, image_token_id=None, video_token_id=None
        )

    @property
    def placeholder(self) -> int:
        """Placeholder token of images; only for models that take images."""
        assert self.image_token_id is not None, "a model of text alone has no placeholder"
        return self.image_token_id

    @property
    def itemsize(self) -> int:
        """Bytes of one value of `dtype`."""
        return 4 if self.dtype == "float32" else 2

    def rank_bytes(self, size: int, ranks: int, *, quantized: bool) -> int:
        """Approximate size of one rank's part of language weights of `size` bytes.

        Ranks divide layers and head. Each has the whole embedding, and packs its part of a tied head from it.
        """
        if ranks == 1 or not size:
            return size
        embedding = self.vocab_size * self.hidden_size * (1 if quantized else self.itemsize)
        packed = self.ties_head and (quantized or self.itemsize == 2)
        return size // ranks + (embedding if packed else embedding - embedding // ranks)

    @property
    def embedding_row_bytes(self) -> int:
        """Bytes of one token's embedding, including all levels."""
        return self.hidden_size * self.embedding_levels * self.itemsize


ARENA_ALIGNMENT = 64


class ArenaLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of the shared arena: pixels first, then pages of embedding rows."""

    pixel_bytes: int
    pages: int
    page_rows: int
    row_bytes: int

    @property
    def embedding_offset(self) -> int:
        """Offset of the embedding region."""
        return -(-self.pixel_bytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT

    @property
    def embedding_bytes(self) -> int:
        """Size of the embedding region."""
        return self.pages * self.page_rows * self.row_bytes

    @property
    def total_bytes(self) -> int:
        """Size of the whole arena."""
        return self.embedding_offset + self.embedding_bytes
