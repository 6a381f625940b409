"""The interface of worker plug-ins, and the batches that they get.

A plug-in executes, and makes no scheduling decisions. `vsched.rank` follows the decision log, keeps slots, block tables
and sequences, and passes complete batches to the plug-in. Nothing here imports torch: arrays are numpy, memory is
buffers.

A plug-in is a module-level object in the entry-point group `vsched.workers`. It derives from `WorkerPlugin`, and what
it loads from `EncodeWorker`, `GenerateWorker` and `Preprocessor`. Abstract methods are required. All others have a
default; those marked with `optional` are a capability that `supports` detects.

CUDA devices of a host, as reported by a worker plug-in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import RequestRefused
from vsched.types import (
    ARENA_ALIGNMENT,
    ArraySpec,
    FinishReason,
    ItemPlace,
    ModelInfo,
    SamplingParams,
    Spans,
    count_of,
)
from vsched.worker.memory import DeviceMemory


class CudaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A CUDA device.

    Attributes:
        capability: Compute capability, major and minor.
        free_bytes: Memory that no process uses.
        problem: Reason why it cannot be used; empty if it can.
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    free_bytes: int = 0
    problem: str = ""

    @property
    def has_bfloat16(self) -> bool:
        """True if the device computes in bfloat16."""
        return self.capability >= (8, 0)


class DeviceSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """The CUDA devices that processes of this host can use, in the order of `cuda:N`.

    Attributes:
        problem: Reason why there are none; empty if there are some.
        failed: True if the survey itself failed, so that there may be devices in spite of it.
    """

    devices: tuple[CudaDevice, ...] = ()
    problem: str = ""
    failed: bool = False


Progress = Callable[[str, float], None]
"""Called during loading with the current activity and the completed fraction, 0 to 1."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def optional(method: _Method) -> _Method:
    """Mark the default of an optional capability."""
    method.is_default = True  # type: ignore[attr-defined]
    return method


def supports(owner: object, method: str) -> bool:
    """Return True if a plug-in, worker or preprocessor has its own implementation of an `optional` method."""
    return not getattr(getattr(owner, method), "is_default", False)


def unsupported(owner: object, what: str) -> NotImplementedError:
    """Return the error of a default without an implementation; the core checks with `supports` first."""
    return NotImplementedError(f"{type(owner).__name__} does not support {what}")


# --- workers ------------------------------------------------------------------------------------------------------


class Worker(ABC):
    """The model of one rank, of either stage.

    Attributes:
        weights_bytes: Bytes of the weights on the device.
        adapter_bytes: Device memory allocated for the maximum number of adapters; not part of `weights_bytes`.
    """

    weights_bytes: int
    adapter_bytes: int = 0

    @abstractmethod
    def device_memory(self) -> DeviceMemory:
        """Return the memory of its device."""

    def abort(self) -> None:
        """Fail the collectives of the group: peers that wait in one, or enter one, raise `DeviceOutOfMemory`.

        Called if this rank failed outside of the worker while its peers may have continued. The next step reconnects
        with the peers, as after a failed step. No-op if they are to be reconnected already, and with a single rank.
        """

    def kernels_here(self) -> Mapping[str, int]:
        """Return for each kernel the number of argument types compiled or loaded in this process so far.

        Only for kernels that are compiled on this machine and cached on disk.
        """
        return {}

    def threads_here(self) -> int:
        """Return the current number of compute threads of this process; 0 on another device than a CPU."""
        return 0

    # Periodic collective work, such as balancing experts over ranks. The engine schedules it in the decision log, so
    # every rank runs it between the same two steps: after an interval with steps.

    def hooks(self) -> Mapping[str, float]:
        """Return the hooks' intervals in seconds by name.

        Called once, after the worker has loaded; equal on every rank.
        """
        return {}

    def run_hook(self, name: str) -> None:
        """Run a hook, as all ranks do. An error ends the rank, and so the group is lost."""

    # Adapters are added and removed between two steps. An adapter has a number, which is used once. The result of a
    # row depends on the adapter of its request only, not on those of other rows.

    @optional
    def add_adapter(self, number: int, path: str) -> None:
        """Load an adapter, completely or not at all; its weights for the other stage are ignored.

        Raises:
            CheckpointError: When it cannot be read, or does not fit this model.
            DeviceOutOfMemory: When the device's memory ran out.
        """
        raise unsupported(self, "adapters")

    def add_trial_adapter(self, number: int) -> None:
        """Add an adapter of the maximum rank to all layers that support one, for the profiling run."""

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter; no-op if there is none of this number."""


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


class EncodeWorker(Worker):
    """The vision tower of one rank.

    Attributes:
        pauses: Whether it can pause within a batch with this model, for steps of the generate group in the same
            processes: `begin` and `advance`. Memory held during a pause is needed in addition to that of steps.
    """

    pauses: bool = False

    @abstractmethod
    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Encode the jobs in one batch and write their rows.

        Shape: `embeddings` is the arena's embedding region, uint8 [pages, rows per page, bytes per row]. A row is the
        main embedding of a token, followed by those of its deepstack levels.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out; the batch may be retried in parts.
        """

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Accept a batch, as `encode` does, without computing; an unfinished batch is dropped."""
        raise unsupported(self, "pauses")

    def advance(self, layers: int) -> bool:
        """Run `layers` layers of the batch, 0 for all that are left; return True when it is done.

        The worker defines layers: pieces of about equal duration, the same on all ranks. Rows and errors are as with
        `encode`; an error drops the batch.
        """
        raise unsupported(self, "pauses")

    def sparsely(self) -> AbstractContextManager[None]:
        """Within the context, batches allocate their usual memory, but need not be computed: their rows are unused."""
        return nullcontext()


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

    def foresee(
        self, wanted: Sequence[int], count: int
    ) -> list[tuple[int, npt.NDArray[np.uint32]]]:
        """Return up to `count` draft tokens with the mask after each, without changing the state.

        They are the tokens that the grammar forces, and tokens of `wanted` that it allows; see
        `vsched.worker.drafts.foresee_with`.
        """


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
        adapter: Number of the adapter for all its rows, 0 for none; see `Worker.add_adapter`.
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
    snapshots to take, for a model with a recurrent state: (end, snapshot slot) in order, of the state after position
    `end` - 1. The first `reported` rows compute the log-probability of the prompt token after them; only with
    `WorkerPlugin.computes_prompt_logprobs`.
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

    With `WorkerPlugin.verifies_drafts`, a slot may have several consecutive decode rows: its last token, and draft
    tokens at the following positions. Each row attends to those before it; `SequenceState.tokens` has the draft tokens
    beyond its length.

    Shape:
        decode_slots: int32 [D], ascending. decode_tokens: int32 [D], the last token of each slot, or a draft token.
        decode_positions: int32 [D], the KV position written by this step, equal to the number of tokens before it.
        block_tables: int32 [slots, blocks per sequence], by slot; only the first blocks of a row are valid.
        embeddings: uint8 [pages, rows per page, bytes per row], the arena's embedding region (read only).
        restored: (slot, snapshot slot) of snapshots to restore, before any chunk writes one.
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

    Shape: `chunk` is the index of the chunk; logprobs float32 [reported], ranks int32 [reported] (1 for the most
    likely), top_ids int32 and top_logprobs float32 [reported, requested alternatives], best first.
    """

    chunk: int
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a step, int32 [rows], and the requested log-probabilities.

    A token of -1 ends its request with an error: none can be drawn, as no logit of the row is a finite number.
    `prompts` has one entry for each chunk with `reported` rows.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)


class GenerateWorker(Worker):
    """The language model of one rank.

    Attributes:
        skips_layers: Whether `first_layers` can be used, and each layer frees all that it allocates: then two layers
            have the peak of all.
        frugal: Whether, in addition, memory that grows with a sequence is allocated for one sequence at a time: then
            the longest sequence has the peak of any number.
    """

    skips_layers: bool = False
    frugal: bool = False

    @abstractmethod
    def build_kv(self, *, blocks: int, block_size: int, touch: bool = True) -> None:
        """Allocate a KV cache of this number of blocks and everything that refers to it, after dropping an older one.

        Without `touch`, pages may be left for the host to allocate on first use: a restarted group builds a size that
        was proved before, while its requests wait.

        Raises:
            DeviceOutOfMemory: When it does not fit.
        """

    def drop_graphs(self) -> None:
        """Drop captured graphs, which refer to the KV cache, if there are any."""

    @abstractmethod
    def drop_kv(self) -> None:
        """Drop the KV cache and the attention backends that refer to it, so that their memory can be released."""

    def prepare(self, sequence: SequenceState) -> None:
        """Set `sequence.state`, such as positions; called once, before its first chunk.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """

    @abstractmethod
    def step(self, batch: Batch) -> Sampled:
        """Run one step and sample.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """

    def first_layers(self, count: int) -> AbstractContextManager[None]:
        """Within the context, run only the first `count` layers; the results are invalid. Only if `skips_layers`."""
        raise unsupported(self, "a part of its layers")

    @optional
    def build_swap(self, blocks: int) -> None:
        """Allocate host memory for this number of blocks of the current KV cache; a new KV cache needs a new call.

        Raises:
            DeviceOutOfMemory: When the host does not have enough.
        """
        raise unsupported(self, "swapping")

    def swap(self, out: npt.NDArray[np.int32], back: npt.NDArray[np.int32]) -> None:
        """Copy blocks to swap slots in host memory, then swap slots to blocks, between two steps.

        Shape: int32 [copies, 2]: (block, swap slot) in `out`, and (swap slot, block) in `back`. Slots of `out` are
        unique, as are blocks of `back`; a block may be in both.

        Order: copies out read the results of all earlier steps, and later steps read what was copied back. The call may
        return earlier, as long as no later step writes to a block that is still read.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        raise unsupported(self, "swapping")


# --- preprocessor ------------------------------------------------------------------------------------------------


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
        kept: Ranges of the tokens that have placeholders; None for all, empty for a pruned frame group.
    """

    arrays: tuple[ArraySpec, ...]
    tokens: int
    expansion: tuple[int, ...] = ()
    metadata: bytes = b""
    work_bytes: int = 0
    kept: Spans | None = None

    @property
    def placeholders(self) -> int:
        """Number of placeholders in the prompt."""
        return self.tokens if self.kept is None else count_of(self.kept)


class PixelBounds(msgspec.Struct, frozen=True):
    """A request's bounds on the number of pixels after resizing; None for the checkpoint's bound."""

    min_pixels: int | None = None
    max_pixels: int | None = None


class VideoFacts(msgspec.Struct, frozen=True):
    """Facts of a video: the size of its upright frames, their number, and the rate in frames per second."""

    width: int
    height: int
    frames: int
    rate: float


class VideoSampling(msgspec.Struct, frozen=True):
    """A request's options for a video; None for the checkpoint's.

    Attributes:
        fps: Frames to sample per second; of frames that are sent as images, the rate at which they were sampled.
        num_frames: Number of frames to sample, instead of `fps`.
        max_frames: Maximum number of frames.
        bounds: Bounds in pixels, as the checkpoint's video processor has them: of a frame, or of all frames.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    bounds: PixelBounds = PixelBounds()


class FrameSize(msgspec.Struct, frozen=True):
    """The size that frames are resized to."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """The result of preprocessing a video.

    Attributes:
        frames: Numbers of the sampled frames, ascending; each group has the next few, and the last may repeat.
        size: The size that they are resized to.
        groups: The plan of each frame group; their expansions, one after the other, replace the video's placeholder.
        work_bytes: Maximum memory for processing a group, besides its frames.
        grid: Rows and columns of a group's tokens, if `token_changes` compares them.
        row_token: The token of each row in expansions, if text between groups stays when all their rows are pruned;
            None for the video's placeholder in a prompt.
    """

    frames: tuple[int, ...]
    size: FrameSize
    groups: tuple[ImagePlan, ...]
    work_bytes: int = 0
    grid: tuple[int, int] = (0, 0)
    row_token: int | None = None

    @property
    def group_frames(self) -> int:
        """Number of frames of a group."""
        return len(self.frames) // len(self.groups)


ItemPlan = ImagePlan | VideoPlan


@dataclass(frozen=True, slots=True)
class Companion:
    """A tensor of integers that clients must send with an embedding, and that determines the item's plan.

    `name` is the tensor's name, and `values` describes each integer, in words for clients.
    """

    name: str
    values: tuple[str, ...]


class Detokenizer(Protocol):
    """Converts the tokens of one choice to text incrementally; never emits incomplete characters."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is certain."""

    def flush(self) -> str:
        """Return the text held back."""


class ImageRecipe(msgspec.Struct, frozen=True):
    """Recipe for an image processor in another process: `maker` is `module:function`, called with `settings`."""

    maker: str
    settings: bytes


class AnswerPart(NamedTuple):
    """A part of the output: `content`, `reasoning`, or a `call`, whose text is the JSON of its arguments.

    A call without a name is a further piece of the last one's arguments.
    """

    kind: Literal["content", "reasoning", "call"]
    text: str
    name: str = ""


class AnswerParser(Protocol):
    """Parses one output in the checkpoint's format."""

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Add the next piece of the output; return the parts that are certain."""

    def finish(self) -> Sequence[AnswerPart]:
        """Return the parts held back."""


def no_pixel_bounds() -> RequestRefused:
    """Return the error for bounds with a model whose images are resized by other rules, or not at all."""
    return RequestRefused(
        "the model's images are not resized between two numbers of pixels. "
        "Remedy: leave min_pixels and max_pixels out, and send images of the size that you want.",
        code="pixel_bounds_not_taken",
    )


class ImageProcessing(ABC):
    """Converts images to arrays: a `Preprocessor`, or the image processor built by its `ImageRecipe`."""

    @abstractmethod
    def process_image(self, image: Image.Image) -> Arrays:
        """Return the arrays of an RGB image, with the names, dtypes and shapes of `Preprocessor.plan_image`.

        Besides the image, it may use 2.25 times the size of its result, including the result, or `work_bytes` of the
        plan; this is its budget.
        """

    def process_frames(self, frames: Sequence[Image.Image], size: FrameSize) -> Arrays:
        """Return the arrays of a frame group, with the names, dtypes and shapes of its plan.

        `frames` are RGB images, `size` that of `VideoPlan`. Memory as for `process_image`.
        """
        raise _videos_refused()

    @optional
    def token_changes(self, before: Arrays, group: Arrays) -> npt.NDArray[np.float32]:
        """Return the mean difference of each token's pixels from those of the frame group before, 0 to 1.

        Memory as for `process_frames`, whose arrays it gets.
        """
        raise unsupported(self, "pruning of videos")

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> Self:
        """Return a copy with other bounds, which has another `settings_digest` if they differ.

        `pixels_max` is the size of the largest accepted image before resizing, for which encoder memory was measured.

        Raises:
            RequestRefused: When images within these bounds could have more or fewer tokens than measured, or the
                checkpoint's images have no such bounds, as by default.
        """
        raise no_pixel_bounds()


class Preprocessor(ImageProcessing):
    """The checkpoint's tokenizer, chat template and image processor; thread-safe, torch-free while it runs.

    The defaults are those of a model that takes no images.

    Attributes:
        settings_digest: Digest of all settings that the arrays of an image depend on.
        companion: The argument of `plan_embedding`; None if clients cannot send embeddings.
        video_times: Name of the tensor of seconds that clients must send with the embeddings of a video, too; empty if
            they cannot send such embeddings.
        prunes_videos: Whether plans of videos have a `grid`, and `token_changes` compares tokens.
    """

    info: ModelInfo
    settings_digest: bytes = b""
    companion: Companion | None = None
    video_times: str = ""
    prunes_videos: bool = False

    @property
    def chat_template(self) -> str:
        """The text of the chat template, or of all templates; empty for none."""
        return ""

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables of the chat template that requests may set."""
        return frozenset()

    @abstractmethod
    def render(self, messages: Sequence[dict[str, Any]], **template_arguments: Any) -> str:
        """Render messages in OpenAI's format with the chat template, with one placeholder per image.

        The result is passed to `tokenize` unchanged: it may mark special tokens that are text of the messages.

        Raises:
            RequestRefused: When the template rejects the messages.
        """

    @abstractmethod
    def tokenize(self, text: str, *, images: bool = True) -> list[int]:
        """Return token ids; the GIL is released, or held only briefly.

        Special tokens are recognized, except in text of messages. Without `images` the image placeholder is text, too.
        Special tokens are added only to the start of a text that is not from `render`, as the model expects it.

        Raises:
            RequestRefused: When the tokens exceed `info.context_tokens`; checked by size alone if that suffices.
        """

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        detokenizer = self.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token (for log-probabilities)."""

    @abstractmethod
    def detokenizer(self, *, special: bool = False) -> Detokenizer:
        """Return a new incremental detokenizer; its text has special tokens only with `special`."""

    @property
    def parses_answers(self) -> bool:
        """Whether this checkpoint specifies the format of its output, and so has an `answer_parser`."""
        return False

    def answer_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        """Return a parser for the output after `prompt`, or its last part; `tools` are in the template's format."""
        raise unsupported(self, "parsing outputs")

    def plan_image(self, width: int, height: int) -> ImagePlan:
        """Return the plan of an image of this size.

        Raises:
            RequestRefused: When the checkpoint's processor does not support the size (aspect ratio, tokens).
        """
        raise _images_refused()

    def plan_embedding(self, companion: Sequence[int]) -> ImagePlan:
        """Return the plan of an image whose embedding a client sends with these integers.

        Their number is that of `companion`'s values; nothing else of them has been checked.

        Raises:
            RequestRefused: When there is no such image, or clients cannot send embeddings.
        """
        raise _images_refused()

    def process_image(self, image: Image.Image) -> Arrays:
        """See `ImageProcessing`."""
        raise _images_refused()

    def plan_video(
        self, facts: VideoFacts, sampling: VideoSampling, *, frames_max: int, sample: bool = True
    ) -> VideoPlan:
        """Return the plan of a video; without `sample`, all of its frames are used.

        Raises:
            RequestRefused: When the checkpoint's processor does not support the size or the options, or more than
                `frames_max` frames are asked for.
        """
        raise _videos_refused()

    def plan_embedded_video(
        self, companion: Sequence[int], seconds: Sequence[float], *, frames_max: int
    ) -> VideoPlan:
        """Return the plan of a video from the integers and seconds that a client sends with its embeddings.

        The number of integers is that of `companion`'s values, and the seconds are within limits; the rest is
        unchecked. The plan has no frames.

        Raises:
            RequestRefused: When there is no such video of `frames_max` frames at most.
        """
        raise _videos_refused()

    def image_recipe(self) -> ImageRecipe | None:
        """Return the recipe for processing images in isolated processes, where they do not block the event loop."""
        return None

    def expand(
        self, token_ids: Sequence[int], plans: Sequence[ItemPlan]
    ) -> tuple[list[int], list[Spans]]:
        """Replace the i-th placeholder of an image or video by the expansion of `plans[i]`.

        Return the ids, and the placeholders of each image and of each frame group of a video.

        Implemented by `vsched.worker.expansion`.

        Raises:
            RequestRefused: When the numbers of placeholders and images or videos differ, or the model does not support
                them there.
        """
        if plans:
            raise _images_refused()
        return list(token_ids), []


def _images_refused() -> RequestRefused:
    return RequestRefused(
        "the model takes no images. Remedy: send text alone.", code="images_not_taken"
    )


def _videos_refused() -> RequestRefused:
    return RequestRefused(
        "the model takes no videos. Remedy: send frames of it as images.", code="videos_not_taken"
    )


# --- plug-in -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a rank's model.

    Attributes:
        threads: Maximum number of compute threads on a CPU.
        threads_fixed: Whether all of them are always used. Otherwise a worker may use fewer while other programs keep
            the cores busy; its results must not depend on the number.
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
        activations: Type of activations in products with int8 or 4-bit weights: `float`, `int8`, or `auto`: the best.
    """

    device: str = "cpu"
    threads: int = 1
    threads_fixed: bool = True
    attention: str = "auto"
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
    activations: str = "auto"

    @property
    def quantizes(self) -> bool:
        """Whether weights are quantized on loading."""
        return self.weights != "auto"


INVALID_GRAMMAR, GRAMMAR_NOT_SUPPORTED = "invalid_grammar", "grammar_not_supported"
"""Error codes: this grammar cannot be used; this model has no grammars."""


class Grammars(Protocol):
    """Compiles grammars over the tokens of one checkpoint.

    A grammar is JSON with one key: `json_schema`, a schema; `regex`, a text; `choice`, a list of texts; or `grammar`, a
    text in Lark or GBNF. Acceptance and token masks depend on the grammar and the checkpoint only, never on time: the
    engine and the ranks must agree.
    """

    def check(self, grammar: str) -> None:
        """Compile a grammar within limits of CPU time, and generate one output with it.

        This runs in an isolated process, which native code may crash, before any rank compiles the grammar.

        Raises:
            RequestRefused: With the code `invalid_grammar`, when it cannot be used.
        """

    def matcher(self, grammar: str) -> TokenMatcher:
        """Return a matcher for one output, from its first token on; the grammar has passed `check`."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Facts of an adapter for the engine.

    Attributes:
        rank: The maximum rank of its layers.
        changes_encoder: Whether it has weights for the encoder, so that encode ranks load it, too.
    """

    rank: int
    changes_encoder: bool = False


class WorkerPlugin(ABC):
    """The object of an entry point in `vsched.workers`.

    Methods for the commands, such as `vsched check` and `vsched demo`, are in `vsched.checkpoint_tools`.
    """

    @abstractmethod
    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        """Return the facts of a checkpoint without loading weights.

        `dtype` is `auto` or a name; `item_tokens_max` is the maximum number of tokens per image, 0 for no limit.

        Raises:
            CheckpointError: When the checkpoint does not exist, its family is unsupported, or files are missing.
        """

    @abstractmethod
    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Check that a stage, `encode` or `generate`, supports this number of tensor-parallel ranks.

        Raises:
            CheckpointError: When a size of the model is not divisible; names the size and possible numbers.
        """

    @abstractmethod
    def load_preprocessor(self, info: ModelInfo) -> Preprocessor:
        """Load tokenizer, template and image processor, limited to `info.item_tokens_max`."""

    @abstractmethod
    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> EncodeWorker:
        """Load only the vision tower.

        Raises:
            CheckpointError: When weights are missing or a file is corrupt.
        """

    @abstractmethod
    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        """Load only the language model.

        Raises:
            CheckpointError: When weights are missing or a file is corrupt.
        """

    # Start-up.

    def forgo_models(self, path: str) -> None:
        """Prepare this process to load the preprocessor of a checkpoint but no model, with fewer imports; called first.

        Raises:
            CheckpointError: When the checkpoint does not exist.
        """

    def forkable_modules(self, info: ModelInfo, device: str) -> Sequence[str]:
        """Return the modules that ranks of a model import, to fork ranks from a process that has imported them.

        Importing them must not start threads or use devices. Empty if a rank must be a new process, as with CUDA.
        """
        return ()

    def survey_devices(self, *, timeout_s: float) -> DeviceSurvey | None:
        """Return the CUDA devices of this host, without loading CUDA into this process.

        None, as by default, if workers run on a CPU or only on configured devices: then `auto` is `cpu`.
        """
        return None

    # Memory of the largest batch of images.

    def worst_batches(
        self, info: ModelInfo, *, items: int, tokens: int, pixels_max: int
    ) -> list[list[ImagePlan]] | None:
        """Return candidates for the valid batch with the highest peak memory; that batch is among them.

        `items` and `tokens` are the limits of a batch, 0 for none; an image with more tokens runs alone. `pixels_max`
        is the size of the largest accepted image before resizing; `info.item_tokens_max` limits the tokens of an image.
        Empty if no image is valid; None if unknown: then no memory is reserved for the encoder.
        """
        return None

    def sample_arrays(self, info: ModelInfo, plan: ImagePlan) -> Arrays:
        """Return real arrays for a plan from `worst_batches`, such as masks and indices; missing arrays are zeros."""
        return {}

    # Abilities of the generate workers.

    def computes_prompt_logprobs(self, info: ModelInfo, *, ranks: int) -> bool:
        """Return True if this number of ranks can compute log-probabilities of prompt tokens for this model.

        It must not need more memory than the steps of the profiling run, which compute none.
        """
        return False

    def verifies_drafts(self, info: ModelInfo, *, device: str) -> bool:
        """Return True if workers can verify draft tokens: several decode rows per slot in a step; see `Batch`.

        Recurrent layers cannot, as a state is not undone.
        """
        return False

    def swaps_kv(self, info: ModelInfo, *, device: str) -> bool:
        """Return True if workers have `build_swap` and `swap`; not with layers that have a state besides KV."""
        return False

    @optional
    def load_grammars(self, info: ModelInfo) -> Grammars | None:
        """Load the grammar compiler of a checkpoint, for checks and in generate ranks; None if it has none."""
        return None

    @optional
    def keep_adapter(self, info: ModelInfo, path: str, kept: str, *, rank_max: int) -> AdapterFacts:
        """Copy the files of an adapter to the new folder `kept`, and check the copy without loading the model.

        Ranks read the copy, also after a restart, so that a loaded adapter does not change.

        Raises:
            CheckpointError: When a file is missing, damaged or too large, or the adapter is not supported.
        """
        raise unsupported(self, "adapters")
