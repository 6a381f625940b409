"""What a worker plug-in implements, and the batches it is handed.

A plug-in executes; it never decides. `vsched.rank` follows the decision log, keeps slots, block tables and
sequences, and hands complete batches to the plug-in. Nothing here imports torch: arrays are numpy, memory is buffers.

A plug-in is one module-level object that the entry-point group `vsched.workers` names; it implements `WorkerPlugin`.
What it and its workers may be able to do beyond that is in `vsched.worker.capabilities`.
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
"""Called while loading with what is being done and the fraction done, 0 to 1."""


# --- encode ------------------------------------------------------------------------------------------------------

Arrays = Mapping[str, npt.NDArray[Any]]
"""Arrays by their names."""


def extent_bytes(specs: Sequence[ArraySpec]) -> int:
    """Return the bytes of an extent that holds these arrays."""
    size = 0
    for spec in specs:
        size = -(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT + spec.nbytes
    return size


def view_arrays(
    specs: Sequence[ArraySpec], extent: npt.NDArray[np.uint8]
) -> dict[str, npt.NDArray[Any]]:
    """Return views of the arrays in the bytes of an extent; writable as those are.

    Raises:
        ValueError: When the extent is too small for them.
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

    `arrays` are those of its `ImagePlan`, views of the arena (read-only, valid until the job is done), and `metadata`
    is that of its plan. `pages` are the arena pages that receive its `tokens` rows, in order; the last page may be
    partly filled. `adapter` is the number of the adapter that it is encoded with, 0 for none.
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
        """Return the memory of the device that it runs on."""
        ...

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Encode the jobs in one batch and write their rows.

        Shape: `embeddings` is the arena's embedding region, uint8 [pages, rows a page, bytes a row]. A row holds the
        embedding levels of one token one after the other: the main embedding first, then each deepstack level.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out; the batch may be retried in parts.
        """
        ...


# --- generate ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ItemRows:
    """The embedding rows of one item that a chunk covers.

    `index` says which of the request's items it is. `chunk_start` is the index, within the chunk, of the first
    placeholder covered; rows [row_start, row_stop) of the item, found in arena `pages`, fill the placeholders from
    there on. An item with other tokens between its placeholders has one of these for each run of them.
    """

    index: int
    chunk_start: int
    row_start: int
    row_stop: int
    pages: Sequence[int]


class TokenMatcher(Protocol):
    """Follows the output of one request through its grammar.

    Attributes:
        mask: The tokens that may come next, as `SequenceState.token_mask`; one array, written anew when it is read
            after a `follow`, which takes most of the time. A rank reads it once it has sent what a step yielded.
    """

    @property
    def mask(self) -> npt.NDArray[np.uint32]: ...

    def follow(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Take the next tokens of the output; return `STOP` where nothing may come after them, else None.

        `ERROR` is that the grammar cannot be followed any more: it became too complex, or a token does not fit. What
        reading the mask finds out is told by the next call: until then the mask allows every token.
        """
        ...

    def foresee(
        self, wanted: Sequence[int], count: int
    ) -> list[tuple[int, npt.NDArray[np.uint32]]]:
        """Return up to `count` tokens that may come next, and the mask after each; nothing is followed.

        They are those that must come, and in between those of `wanted` that may; see
        `vsched.worker.drafting.drafts.foresee_with`.
        """
        ...


@dataclass(slots=True)
class SequenceState:
    """A request as a rank keeps it, from its first decision to its release.

    Attributes:
        number: The kernel's number of the request.
        tokens: Prompt and output tokens so far; int32, `length` of them valid.
        prompt_length: How many of them are the prompt.
        items: Where each image lies, in prompt order.
        state: What the plug-in keeps of it (positions, rope delta, sampler state); set by `GenerateWorker.prepare`.
        token_mask: The tokens that may be chosen next, uint32 [words]: bit i of word j allows token 32 j + i; tokens
            beyond its words are forbidden. None allows all. Whoever sets it has the rank call the request special.
        matcher: Follows the outputs where the request has a grammar; the mask is its.
        adapter: Number of the adapter that all its rows are computed with, 0 for none; the worker has it, see
            `vsched.worker.capabilities.ServesAdapters`.
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
        """Whether a token of it may be another than the argmax of the raw logits, or more than a token is asked for.

        A least number of tokens forbids stop tokens, and so nothing where there are none, as with `ignore_eos`.
        """
        forbids = self.sampling.min_tokens > 0 and bool(self.stop_token_ids)
        return forbids or not self.sampling.is_plain_greedy


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one prompt, positions [start, stop), to prefill in this step.

    `samples` is True when the chunk ends the known tokens, so that its last row yields a token. `writes` are the
    snapshots to take, for a model with a state: (end, place) in order, of the state after position `end` - 1. The first
    `told` rows are to tell of the token after them, which is one of the prompt; only of a plug-in that
    `TellsPrompts`.
    """

    slot: int
    sequence: SequenceState
    start: int
    stop: int
    samples: bool
    items: Sequence[ItemRows]
    writes: Sequence[tuple[int, int]] = ()
    told: int = 0


@dataclass(slots=True)
class Batch:
    """One step of the generate stage.

    Rows that yield a token are, in order: the decode rows, then each chunk with `samples`.

    Only of a plug-in that `VerifiesDrafts`, a slot may have several decode rows, one after the other: its last token,
    and drafts at the positions behind it. Each sees those before it; `SequenceState.tokens` holds them, past its
    length.

    Shape:
        decode_slots: int32 [D], ascending. decode_tokens: int32 [D], the last token of each slot, or a draft.
        decode_positions: int32 [D], the KV position that this step writes: tokens before it.
        block_tables: int32 [slots, blocks a sequence]; row = slot; only the first blocks of a row are meaningful.
        embeddings: uint8 [pages, rows a page, bytes a row], the arena's embedding region (read only).
        restored: (slot, place) of the states that slots begin with, to be read before any chunk writes one.
        special: (row, sequence) of the rows that need more than the argmax of their raw logits; of a row of a draft
            the sequence is a copy, with the mask at its place.
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
    """Log-probabilities of one sampled token and of the most likely alternatives, best first."""

    row: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens that a chunk tells of, each by the row before it.

    Shape: `chunk` is the index of the chunk; logprobs float32 [told], ranks int32 [told] (1 for the most likely),
    top_ids int32 and top_logprobs float32 [told, as many as the request asks for], best first.
    """

    chunk: int
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a step, int32 [rows], and log-probabilities for the rows that asked for them.

    `prompts` has one entry for each chunk that tells of its prompt.
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
        """Return the memory of the device that it runs on."""
        ...

    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        """Allocate a KV cache of this many blocks, and anew whatever refers to it; an older one is dropped first.

        Without `touch` memory that the host hands out on first use may be left to it: a group that comes back builds
        what was proved before, and its requests wait.

        Raises:
            DeviceOutOfMemory: When it does not fit.
        """
        ...

    def drop_graphs(self) -> None:
        """Forget what was captured of steps: it points into the KV cache. Nothing where nothing is captured."""
        ...

    def drop_kv(self) -> None:
        """Forget the KV cache and the attention backends that refer to it, so that their memory can be released."""
        ...

    def prepare(self, sequence: SequenceState) -> None:
        """Set `sequence.state`: positions and the like; called once, before its first chunk.

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
    """What an image of some size becomes.

    Attributes:
        arrays: What `process_image` will return, in the order in which it lies in the arena; `pixel_values` say.
        tokens: Encoder output tokens.
        expansion: What takes the place of its placeholder in a prompt: token ids, `tokens` placeholders among them;
            empty where it is nothing but those.
        metadata: What the plug-in must know of the image beside the arrays, as for its positions: a few bytes in its
            own encoding, which travel with every decision on the image. An encode worker finds them in `EncodeJob`,
            a generate worker in `ItemPlace`.
        work_bytes: Most memory that `process_image` takes beyond the image, what it returns included, where that may
            be more than 2.25 times what it returns.
    """

    arrays: tuple[ArraySpec, ...]
    tokens: int
    expansion: tuple[int, ...] = ()
    metadata: bytes = b""
    work_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Companion:
    """What a client must send beside an embedding: a tensor of integers, from which the plan of its image follows.

    `name` is the tensor's name, and `values` says what each of its integers is, in words for clients.
    """

    name: str
    values: tuple[str, ...]


class Detokenizer(Protocol):
    """Turns the tokens of one request into text as they come; never emits half a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make certain."""
        ...

    def flush(self) -> str:
        """Return what was held back."""
        ...


class ImageRecipe(msgspec.Struct, frozen=True):
    """How another process makes what processes images: `maker` is `module:function`, called with `settings`."""

    maker: str
    settings: bytes


class ImageProcessing(Protocol):
    """What an `ImageRecipe` makes."""

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the arrays of an RGB image, as the preprocessor's method of this name."""
        ...


class Preprocessor(Protocol):
    """The checkpoint's tokenizer, chat template and image processor; thread-safe, torch-free while it runs."""

    info: ModelInfo
    settings_digest: bytes
    """Digest over everything but the image that its arrays depend on."""

    @property
    def companion(self) -> Companion | None:
        """What `plan_embedding` takes; None where clients cannot bring embeddings."""
        ...

    @property
    def chat_template(self) -> str:
        """The text of the chat template, or of all that there are; empty for none."""
        ...

    def render(self, messages: Sequence[dict[str, Any]], **template_arguments: Any) -> str:
        """Render OpenAI-shaped messages with the chat template, one placeholder an image.

        What it returns goes to `tokenize` as it is: it may know which special tokens are text of the messages.

        Raises:
            RequestRefused: When the template rejects the messages.
        """
        ...

    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        """Return token ids; the GIL is released, or held for moments only.

        Special tokens are recognised but for those in messages. Without `images` the image placeholder is text, too.
        None are added but to a text that `render` did not make: it begins as the model expects a text to begin.

        Raises:
            RequestRefused: When the tokens exceed `info.context_tokens`; by its size alone where that suffices.
        """
        ...

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, special tokens skipped."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for (for log-probabilities)."""
        ...

    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        """Return a fresh incremental detokenizer for one request; its text has special tokens only with `special`."""
        ...

    def plan_image(self, width: int, height: int) -> ImagePlan:
        """Return what an image of this size becomes.

        Raises:
            RequestRefused: When the checkpoint's processor cannot take such a size (aspect ratio, tokens).
        """
        ...

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        """Return the plan of an image whose embedding a client brings, from what it sent beside it.

        There are as many integers as `companion` has values; nothing else of them has been checked.

        Raises:
            RequestRefused: When there is no such image, or clients cannot bring embeddings.
        """
        ...

    def process_image(self, image: Image.Image) -> Arrays:
        """Return the arrays of an RGB image, with the names, dtypes and shapes that `plan_image` tells.

        It may take 2.25 times the bytes that it returns, those included, beyond the image, or `work_bytes` of the plan:
        so much is budgeted.

        If the preprocessor has a method `image_recipe`, which returns an `ImageRecipe`, images are processed in
        isolated processes, where they do not block the event loop.
        """
        ...

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ImagePlan]
    ) -> tuple[list[int], list[Spans]]:
        """Replace the i-th image placeholder as `plans[i]` says; return the ids, and each image's placeholders.

        `vsched.worker.expansion` does so.

        Raises:
            RequestRefused: When placeholders and images differ in number, or the model cannot take images so placed.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a rank runs its model.

    Attributes:
        threads: Threads that the process computes with on a CPU, at most.
        threads_fixed: Whether it always computes with all of them. Otherwise a worker may use fewer while other
            programs keep the cores busy; its results must not depend on the number.
        encode_tokens_max: Cap on the tokens of one encode batch; 0 for none.
        slots: Most sequences that run at a time; 0 for an encoder.
        state_snapshots: Places for states beside those of the slots, for a model that keeps one.
        ranks: Ranks that share the model (tensor parallel); `rank` is the number of this one among them.
        rendezvous: A path of this group's own, where its ranks find each other; empty for a single rank.
        deterministic: Whether what is computed for a row must not depend, to the bit, on the rows beside it. A worker
            that cannot do so refuses with a `ConfigError`.
        adapters: How many adapters there may be at a time, and `adapter_rank_max` of which rank; 0 for none. Their
            memory is taken when the model is loaded. A worker that cannot serve any refuses with a `ConfigError`.
        promises: Whether the memory of a KV cache may be reserved, and given by the host as it is used, where the host
            lets that be relied on.
        weights: What weights are made into on loading, `int8` or `int4`; `auto` leaves them as the checkpoint has them.
        weights_group: Inputs of an output that have one scale then; 0 for as many as is usual.
        calibration: The file by which scales of these are chosen, of those that `Calibrates` writes; empty for none.
        activations: What rows are multiplied as by weights of int8 or int4: `float`, `int8`, or `auto`, the best.
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
        """Whether weights are made into fewer bits."""
        return self.weights != "auto"


class WorkerPlugin(Protocol):
    """What an entry point in `vsched.workers` names."""

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        """Read the checkpoint's facts without loading weights.

        `dtype` is `auto` or a name; `item_tokens_max` is the per-image token cap, 0 for none.

        Raises:
            CheckpointError: When there is no such checkpoint, its family is unsupported, or files are missing.
        """
        ...

    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Check that a stage, `encode` or `generate`, can be shared by `ranks` ranks.

        Raises:
            CheckpointError: When a size of the model does not divide; it names the size and what would do.
        """
        ...

    def load_preprocessor(self, info: ModelInfo) -> Preprocessor:
        """Load tokenizer, template and image processor, clamped to `info.item_tokens_max`."""
        ...

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> EncodeWorker:
        """Load the vision tower alone.

        Raises:
            CheckpointError: When weights are missing or a file is corrupt.
        """
        ...

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        """Load the language model alone.

        Raises:
            CheckpointError: When weights are missing or a file is corrupt.
        """
        ...
