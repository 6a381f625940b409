"""The interface of worker plug-ins, and the batches that they get.

A plug-in executes, and makes no scheduling decisions. `vsched.rank` follows the decision log, keeps slots, block tables
and sequences, and passes complete batches to the plug-in. Nothing here imports torch: arrays are numpy, memory is
buffers.

A plug-in is a module-level object in the entry-point group `vsched.workers` that implements `WorkerPlugin`. Optional
capabilities are in `vsched.worker.capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.types import (
    ARENA_ALIGNMENT,
    ArraySpec,
    FinishReason,
    ItemPlace,
    ModelInfo,
    SamplingParams,
    Spans,
)
from vsched.worker.memory import DeviceMemory

Progress = Callable[[str, float], None]
"""Called during loading with the current activity and the completed fraction, 0 to 1."""


# --- encode ------------------------------------------------------------------------------------------------------

Arrays = Mapping[str, npt.NDArray[Any]]
"""Arrays by name."""


def extent_bytes(specs: Sequence[ArraySpec]) -> int:
    """Return the size of an extent for these arrays, in bytes."""
    size = 0
    for spec in specs:
        size = -(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT + spec.nbytes
    return size


def view_arrays(
    specs: Sequence[ArraySpec], extent: npt.NDArray[np.uint8]
) -> dict[str, npt.NDArray[Any]]:
    """Return views of arrays in the bytes of an extent; writable if the extent is.

    Raises:
        ValueError: When the extent is too small.
    """
    views: dict[str, npt.NDArray[Any]] = {}
    stop = 0
    for spec in specs:
        start = -(-stop // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        stop = start + spec.nbytes
        views[spec.name] = extent[start:stop].view(spec.dtype).reshape(spec.shape)
    return views


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One item to encode.

    `arrays` and `metadata` are those of its `ImagePlan`; arrays are read-only views of the arena, valid until the job
    is done. `pages` are the arena pages for its `tokens` rows, in order; the last page may be partly filled. `adapter`
    is the number of its adapter, 0 for none.
    """

    key: bytes
    tokens: int
    arrays: Arrays
    metadata: bytes
    pages: Sequence[int]
    adapter: int = 0


class EncodeWorker(Protocol):
    """The vision tower of one rank.

    Attributes:
        weights_bytes: Bytes of the weights on the device.
    """

    @property
    def weights_bytes(self) -> int: ...

    def device_memory(self) -> DeviceMemory:
        """Return the memory of its device."""
        ...

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Encode the jobs in one batch and write their rows.

        Shape: `embeddings` is the arena's embedding region, uint8 [pages, rows per page, bytes per row]. A row is the
        main embedding of a token, followed by those of its deepstack levels.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out; the batch may be retried in parts.
        """
        ...


# --- generate ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ItemRows:
    """The embedding rows of one item that are covered by a chunk.

    `index` is the index of the item in the request. Rows [row_start, row_stop) of the item, in arena `pages`, replace
    the placeholders from index `chunk_start` of the chunk on. An item with other tokens between its placeholders has
    one `ItemRows` for each run of placeholders.
    """

    index: int
    chunk_start: int
    row_start: int
    row_stop: int
    pages: Sequence[int]


class TokenMatcher(Protocol):
    """Follows the output of one request through its grammar.

    Attributes:
        mask: The tokens allowed next, as in `SequenceState.token_mask`. One array, which is computed when it is read
            after `follow`; this takes most of the time, so a rank reads it after it has sent the result of a step.
    """

    @property
    def mask(self) -> npt.NDArray[np.uint32]: ...

    def follow(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Add the next tokens of the output; return `STOP` if no token may follow, else None.

        `ERROR` means that the grammar became too complex, or a token does not match. Errors found while the mask is
        read are returned by the next call; until then the mask allows every token.
        """
        ...

    def foresee(
        self, wanted: Sequence[int], count: int
    ) -> list[tuple[int, npt.NDArray[np.uint32]]]:
        """Return up to `count` draft tokens with the mask after each, without changing the state.

        They are the tokens that the grammar forces, and tokens of `wanted` that it allows; see
        `vsched.worker.drafting.drafts.foresee_with`.
        """
        ...


@dataclass(slots=True)
class SequenceState:
    """The state of a request in a rank, from its first decision to its release.

    Attributes:
        number: The kernel's number of the request.
        tokens: Prompt and output tokens so far; int32, `length` of them valid.
        prompt_length: Number of prompt tokens.
        items: Positions of the images, in prompt order.
        state: The plug-in's state (positions, rope delta, sampler state), set by `GenerateWorker.prepare`.
        token_mask: The tokens allowed next, uint32 [words]: bit i of word j allows token 32 j + i; tokens beyond its
            words are forbidden. None allows all. A request with a mask must be special.
        matcher: The matcher of the request's grammar, if any, which sets the mask.
        adapter: Number of the adapter for all its rows, 0 for none; see `vsched.worker.capabilities.ServesAdapters`.
    """

    number: int
    tokens: npt.NDArray[np.int32]
    length: int
    prompt_length: int
    items: Sequence[ItemPlace]
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    state: Any = None
    token_mask: npt.NDArray[np.uint32] | None = None
    matcher: TokenMatcher | None = None
    adapter: int = 0

    @property
    def outputs(self) -> npt.NDArray[np.int32]:
        """Output tokens so far, int32 [length - prompt_length]."""
        return self.tokens[self.prompt_length : self.length]

    @property
    def is_special(self) -> bool:
        """Whether a token may differ from the argmax of the raw logits, or more than the token is needed.

        `min_tokens` forbids stop tokens, so it has no effect without any, as with `ignore_eos`.
        """
        forbids = self.sampling.min_tokens > 0 and bool(self.stop_token_ids)
        return forbids or not self.sampling.is_plain_greedy


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of one prompt, positions [start, stop), to prefill in this step.

    `samples` is True if the chunk ends at the last known token, so that its last row samples one. `writes` are state
    snapshots to take, for a model with a recurrent state: (end, place) in order, of the state after position `end` - 1.
    The first `reported` rows compute the log-probability of the prompt token after them; only with `TellsPrompts`.
    """

    slot: int
    sequence: SequenceState
    start: int
    stop: int
    samples: bool
    items: Sequence[ItemRows]
    writes: Sequence[tuple[int, int]] = ()
    reported: int = 0


@dataclass(slots=True)
class Batch:
    """One step of the generate stage.

    Rows that sample a token are, in order: the decode rows, then each chunk with `samples`.

    With `VerifiesDrafts`, a slot may have several consecutive decode rows: its last token, and draft tokens at the
    following positions. Each row attends to those before it; `SequenceState.tokens` has the draft tokens beyond its
    length.

    Shape:
        decode_slots: int32 [D], ascending. decode_tokens: int32 [D], the last token of each slot, or a draft token.
        decode_positions: int32 [D], the KV position written by this step, equal to the number of tokens before it.
        block_tables: int32 [slots, blocks per sequence], by slot; only the first blocks of a row are valid.
        embeddings: uint8 [pages, rows per page, bytes per row], the arena's embedding region (read only).
        restored: (slot, place) of snapshots to restore, before any chunk writes one.
        special: (row, sequence) of rows that need more than the argmax of their raw logits; for the row of a draft
            token the sequence is a copy with the mask for that position.
    """

    decode_slots: npt.NDArray[np.int32]
    decode_tokens: npt.NDArray[np.int32]
    decode_positions: npt.NDArray[np.int32]
    decode_sequences: Sequence[SequenceState]
    block_tables: npt.NDArray[np.int32]
    embeddings: npt.NDArray[np.uint8]
    chunks: list[Chunk] = field(default_factory=list)
    restored: Sequence[tuple[int, int]] = ()
    special: list[tuple[int, SequenceState]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of a sampled token and of the most likely alternatives, best first."""

    row: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens, computed by the `reported` rows of a chunk.

    Shape: `chunk` is the index of the chunk; logprobs float32 [told], ranks int32 [told] (1 for the most likely),
    top_ids int32 and top_logprobs float32 [told, requested alternatives], best first.
    """

    chunk: int
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a step, int32 [rows], and the requested log-probabilities.

    `prompts` has one entry for each chunk with `reported` rows.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)


class GenerateWorker(Protocol):
    """The language model of one rank.

    Attributes:
        weights_bytes: Bytes of the weights on the device.
    """

    @property
    def weights_bytes(self) -> int: ...

    def device_memory(self) -> DeviceMemory:
        """Return the memory of its device."""
        ...

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        """Allocate a KV cache of this number of blocks and everything that refers to it, after dropping an older one.

        Without `touch`, pages may be left for the host to allocate on first use: a restarted group builds a size that
        was proved before, while its requests wait.

        Raises:
            DeviceOutOfMemory: When it does not fit.
        """
        ...

    def drop_graphs(self) -> None:
        """Drop captured graphs, which refer to the KV cache, if there are any."""
        ...

    def drop_kv(self) -> None:
        """Drop the KV cache and the attention backends that refer to it, so that their memory can be released."""
        ...

    def prepare(self, sequence: SequenceState) -> None:
        """Set `sequence.state`, such as positions; called once, before its first chunk.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        ...

    def step(self, batch: Batch) -> Sampled:
        """Run one step and sample.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        ...


# --- front end and plug-in ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The result of preprocessing an image of some size.

    Attributes:
        arrays: The arrays that `process_image` will return, such as `pixel_values`, in their order in the arena.
        tokens: Number of encoder output tokens.
        expansion: Token ids that replace its placeholder in a prompt, including `tokens` placeholders; empty if it
            consists of these only.
        metadata: Facts of the image for the workers besides the arrays, such as its grid: a few bytes in the plug-in's
            own encoding, which are part of every decision on the image. They are in `EncodeJob` and in `ItemPlace`.
        work_bytes: Maximum memory of `process_image` besides the image, including its result, if that may be more than
            2.25 times the result.
    """

    arrays: tuple[ArraySpec, ...]
    tokens: int
    expansion: tuple[int, ...] = ()
    metadata: bytes = b""
    work_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Companion:
    """A tensor of integers that clients must send with an embedding, and that determines the image's plan.

    `name` is the tensor's name, and `values` describes each integer, in words for clients.
    """

    name: str
    values: tuple[str, ...]


class Detokenizer(Protocol):
    """Converts the tokens of one choice to text incrementally; never emits incomplete characters."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is certain."""
        ...

    def flush(self) -> str:
        """Return the text held back."""
        ...


class ImageRecipe(msgspec.Struct, frozen=True):
    """Recipe for an image processor in another process: `maker` is `module:function`, called with `settings`."""

    maker: str
    settings: bytes


class ImageProcessing(Protocol):
    """The image processor built by an `ImageRecipe`."""

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the arrays of an RGB image, like `Preprocessor.process_image`."""
        ...


class Preprocessor(Protocol):
    """The checkpoint's tokenizer, chat template and image processor; thread-safe, torch-free while it runs."""

    info: ModelInfo
    settings_digest: bytes
    """Digest of all settings that the arrays of an image depend on."""

    @property
    def companion(self) -> Companion | None:
        """The argument of `plan_embedding`; None if clients cannot send embeddings."""
        ...

    @property
    def chat_template(self) -> str:
        """The text of the chat template, or of all templates; empty for none."""
        ...

    def render(self, messages: Sequence[dict[str, Any]], **template_arguments: Any) -> str:
        """Render messages in OpenAI's format with the chat template, with one placeholder per image.

        The result is passed to `tokenize` unchanged: it may mark special tokens that are text of the messages.

        Raises:
            RequestRefused: When the template rejects the messages.
        """
        ...

    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        """Return token ids; the GIL is released, or held only briefly.

        Special tokens are recognized, except in text of messages. Without `images` the image placeholder is text, too.
        Special tokens are added only to the start of a text that is not from `render`, as the model expects it.

        Raises:
            RequestRefused: When the tokens exceed `info.context_tokens`; checked by size alone if that suffices.
        """
        ...

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token (for log-probabilities)."""
        ...

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        """Return a new incremental detokenizer; its text has special tokens only with `special`."""
        ...

    def plan_image(self, width: int, height: int) -> ImagePlan:
        """Return the plan of an image of this size.

        Raises:
            RequestRefused: When the checkpoint's processor does not support the size (aspect ratio, tokens).
        """
        ...

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        """Return the plan of an image whose embedding a client sends with these integers.

        Their number is that of `companion`'s values; nothing else of them has been checked.

        Raises:
            RequestRefused: When there is no such image, or clients cannot send embeddings.
        """
        ...

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the arrays of an RGB image, with the names, dtypes and shapes of `plan_image`.

        Besides the image, it may use 2.25 times the size of its result, including the result, or `work_bytes` of the
        plan; this is its budget.

        If the preprocessor has a method `image_recipe`, which returns an `ImageRecipe`, images are processed in
        isolated processes, where they do not block the event loop.
        """
        ...

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ImagePlan]
    ) -> tuple[list[int], list[Spans]]:
        """Replace the i-th image placeholder by the expansion of `plans[i]`; return ids and the images' placeholders.

        Implemented by `vsched.worker.expansion`.

        Raises:
            RequestRefused: When the numbers of placeholders and images differ, or the model does not support images
                there.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a rank's model.

    Attributes:
        threads: Maximum number of compute threads on a CPU.
        threads_fixed: Whether all of them are always used. Otherwise a worker may use fewer while other programs keep
            the cores busy; its results must not depend on the number.
        encode_tokens_max: Maximum tokens of an encode batch; 0 for no limit.
        slots: Maximum number of running sequences; 0 for an encoder.
        state_snapshots: Number of state snapshots besides the states of the slots, for a model with a recurrent state.
        ranks: Number of tensor-parallel ranks; `rank` is the index of this one.
        rendezvous: A path for the ranks of this group to find each other; empty for a single rank.
        deterministic: Whether the result of a row must be bitwise independent of other rows in the batch. A worker that
            does not support it raises a `ConfigError`.
        adapters: Maximum number of adapters, 0 for none, and `adapter_rank_max` their maximum rank. Their memory is
            allocated when the model is loaded. A worker that supports none raises a `ConfigError`.
        promises: Whether the KV cache's memory may be reserved and allocated by the host on first use, if the host
            guarantees it.
        weights: Quantization of weights on loading, `int8` or `int4`; `auto` keeps the checkpoint's format.
        weights_group: Group size of quantization scales, in inputs of an output; 0 for the default.
        calibration: Calibration file of the scales, written by `Calibrates`; empty for none.
        activations: Type of activations in products with int8 or int4 weights: `float`, `int8`, or `auto` for the best.
    """

    device: str = "cpu"
    threads: int = 1
    threads_fixed: bool = True
    attention: str = "auto"
    encode_tokens_max: int = 0
    slots: int = 0
    state_snapshots: int = 0
    ranks: int = 1
    rank: int = 0
    rendezvous: str = ""
    deterministic: bool = False
    adapters: int = 0
    adapter_rank_max: int = 0
    promises: bool = False
    weights: str = "auto"
    weights_group: int = 0
    calibration: str = ""
    activations: str = "auto"

    @property
    def quantizes(self) -> bool:
        """Whether weights are quantized on loading."""
        return self.weights != "auto"


class WorkerPlugin(Protocol):
    """The object of an entry point in `vsched.workers`."""

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        """Return the facts of a checkpoint without loading weights.

        `dtype` is `auto` or a name; `item_tokens_max` is the maximum number of tokens per image, 0 for no limit.

        Raises:
            CheckpointError: When the checkpoint does not exist, its family is unsupported, or files are missing.
        """
        ...

    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Check that a stage, `encode` or `generate`, supports this number of tensor-parallel ranks.

        Raises:
            CheckpointError: When a size of the model is not divisible; names the size and possible numbers.
        """
        ...

    def load_preprocessor(self, info: ModelInfo) -> Preprocessor:
        """Load tokenizer, template and image processor, limited to `info.item_tokens_max`."""
        ...

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> EncodeWorker:
        """Load only the vision tower.

        Raises:
            CheckpointError: When weights are missing or a file is corrupt.
        """
        ...

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        """Load only the language model.

        Raises:
            CheckpointError: When weights are missing or a file is corrupt.
        """
        ...
