"""Optional capabilities of workers and plug-ins, recognized by their methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeGuard, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import RequestRefused
from vsched.types import ModelInfo
from vsched.worker.contract import (
    Arrays,
    EncodeJob,
    EncodeWorker,
    ImagePlan,
    Progress,
    SequenceState,
    TokenMatcher,
    WorkerSettings,
)

# --- workers -----------------------------------------------------------------------------------------------------


@runtime_checkable
class PausingEncode(EncodeWorker, Protocol):
    """An encode worker that can pause within a batch, for steps of the generate group in the same processes.

    Attributes:
        pauses: Whether it can with this model. Memory held during a pause is needed in addition to that of steps.
    """

    @property
    def pauses(self) -> bool: ...

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Accept a batch, as `encode` does, without computing; an unfinished batch is dropped."""
        ...

    def advance(self, layers: int) -> bool:
        """Run `layers` layers of the batch, 0 for all that are left; return True when it is done.

        The worker defines layers: pieces of about equal duration, the same on all ranks. Rows and errors are as with
        `encode`; an error drops the batch.
        """
        ...


def can_pause(worker: EncodeWorker) -> TypeGuard[PausingEncode]:
    """Return True if an encode worker can pause within a batch."""
    return isinstance(worker, PausingEncode) and worker.pauses


@runtime_checkable
class SparseEncode(Protocol):
    """An encode worker that can allocate a batch's memory with only part of the computation."""

    def sparsely(self) -> AbstractContextManager[None]:
        """Within the context, batches allocate their usual memory, and their rows are invalid."""
        ...


def encoding_sparsely(worker: EncodeWorker) -> AbstractContextManager[None]:
    """Return the context for memory measurements of batches; a worker without it computes them fully."""
    return worker.sparsely() if isinstance(worker, SparseEncode) else nullcontext()


@runtime_checkable
class FrugalSteps(Protocol):
    """A generate worker that can reach the peak memory of its longest steps in a fraction of their time.

    Attributes:
        frugal: Whether each layer frees all that it allocates, and allocates memory that grows with a sequence for one
            sequence at a time. Then two layers have the peak of all, and the longest sequence that of any number.
    """

    @property
    def frugal(self) -> bool: ...

    def first_layers(self, count: int) -> AbstractContextManager[None]:
        """Within the context, run only the first `count` layers; the results are invalid."""
        ...


@runtime_checkable
class SwapsBlocks(Protocol):
    """A generate worker that can copy KV blocks to host memory of its own, and back; see `SwapsKv`."""

    def build_swap(self, blocks: int) -> None:
        """Allocate host memory for this number of blocks of the current KV cache; a new KV cache needs a new call.

        Raises:
            DeviceOutOfMemory: When the host does not have enough.
        """
        ...

    def swap(self, out: npt.NDArray[np.int32], back: npt.NDArray[np.int32]) -> None:
        """Copy blocks to host places, then host places to blocks; called between two steps.

        Shape: int32 [copies, 2]: (block, place) in `out`, and (place, block) in `back`. Places of `out` are unique, as
        are blocks of `back`; a block may be in both.

        Order: copies out read the results of all earlier steps, and later steps read what was copied back. The call may
        return earlier, as long as no later step writes to a block that is still read.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        ...


@runtime_checkable
class CollectiveWorker(Protocol):
    """A worker that shares its model with other ranks, and can tell them of its failure."""

    def abort(self) -> None:
        """Fail the collectives of the group: peers that wait in one, or enter one, raise `DeviceOutOfMemory`.

        Called if this rank failed outside of the worker while its peers may have continued. The next step reconnects
        with the peers, as after a failed step. No-op if they are to be reconnected already.
        """
        ...


@runtime_checkable
class PeriodicWork(Protocol):
    """A worker with periodic collective work, such as balancing experts over ranks.

    The engine schedules it in the decision log, so every rank runs it between the same two steps: after an interval
    with steps, or when rank 0 requests it, but not in every step.
    """

    def hooks(self) -> Mapping[str, float]:
        """Return the hooks' intervals in seconds by name; 0 for hooks that run only on request.

        Called once, after the worker has loaded; equal on every rank.
        """
        ...

    def run_hook(self, name: str) -> None:
        """Run a hook, as all ranks do. An error ends the rank, and so the group is lost."""
        ...

    def wanted_hooks(self) -> Sequence[str]:
        """Return the hooks that should run soon; called after every step, and used on rank 0 only."""
        ...


@runtime_checkable
class CountsKernels(Protocol):
    """A worker whose kernels are compiled on this machine and cached on disk."""

    def kernels_here(self) -> Mapping[str, int]:
        """Return for each kernel the number of argument types compiled or loaded in this process so far."""
        ...


@runtime_checkable
class UsesThreads(Protocol):
    """A worker that computes on a CPU, with a number of threads that may change."""

    def threads_here(self) -> int:
        """Return the current number of compute threads of this process; 0 on another device."""
        ...


@runtime_checkable
class ServesAdapters(Protocol):
    """A worker that adds adapters to its layers, and removes them, between two steps.

    An adapter has a number, which is used once. `WorkerSettings.adapters` is the maximum number of adapters. The result
    of a row depends on the adapter of its request only, not on those of other rows.

    Attributes:
        adapter_bytes: Device memory allocated for the maximum number of adapters; not part of `weights_bytes`.
    """

    @property
    def adapter_bytes(self) -> int: ...

    def add_adapter(self, number: int, path: str) -> None:
        """Load an adapter, completely or not at all; its weights for the other stage are ignored.

        Raises:
            CheckpointError: When it cannot be read, or does not fit this model.
            DeviceOutOfMemory: When the device's memory ran out.
        """
        ...

    def add_trial_adapter(self, number: int) -> None:
        """Add an adapter of the maximum rank to all layers that support one, for the profiling run."""
        ...

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter; no-op if there is none of this number."""
        ...


def adapter_bytes(worker: object) -> int:
    """Return the device memory that a worker has allocated for adapters."""
    return worker.adapter_bytes if isinstance(worker, ServesAdapters) else 0


@contextmanager
def trial_adapter(worker: object) -> Iterator[int]:
    """Add an adapter of the maximum rank within the context; yield its number, or 0 without adapters.

    There are no other adapters while memory is measured, so its number is free.
    """
    if not isinstance(worker, ServesAdapters) or not worker.adapter_bytes:
        yield 0
        return
    worker.add_trial_adapter(1)
    try:
        yield 1
    finally:
        worker.remove_adapter(1)


# --- plug-ins ----------------------------------------------------------------------------------------------------


@runtime_checkable
class WorstCaseBuilder(Protocol):
    """A plug-in that knows the batches of images that need the most memory of its encoder."""

    def worst_batches(
        self, info: ModelInfo, *, items: int, tokens: int, pixels_max: int
    ) -> list[list[ImagePlan]]:
        """Return candidates for the valid batch with the highest peak memory; that batch is among them.

        `items` and `tokens` are the limits of a batch, 0 for none; an image with more tokens runs alone. `pixels_max`
        is the size of the largest accepted image before resizing; `info.item_tokens_max` limits the tokens of an image.
        Empty if no image is valid.
        """
        ...


@runtime_checkable
class SampleImages(Protocol):
    """A plug-in whose encoder needs real arrays for memory measurements, such as masks and indices."""

    def sample_arrays(self, info: ModelInfo, plan: ImagePlan) -> Arrays:
        """Return arrays for a plan from `worst_batches`; arrays that are missing are zeros."""
        ...


class PixelBounds(msgspec.Struct, frozen=True):
    """A request's bounds on the number of pixels after resizing; None for the checkpoint's bound."""

    min_pixels: int | None = None
    max_pixels: int | None = None


@runtime_checkable
class BoundsImages(Protocol):
    """A preprocessor, or the product of its recipe, that resizes images to a range of pixels."""

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> Self:
        """Return a copy with other bounds, which has another `settings_digest` if they differ.

        `pixels_max` is the size of the largest accepted image before resizing, for which encoder memory was measured.

        Raises:
            RequestRefused: When images within these bounds could have more or fewer tokens than measured, or the
                checkpoint's images have no such bounds.
        """
        ...


def no_pixel_bounds() -> RequestRefused:
    """Return the error for bounds with a model whose images are resized by other rules, or not at all."""
    return RequestRefused(
        "the model's images are not resized between two numbers of pixels. "
        "Remedy: leave min_pixels and max_pixels out, and send images of the size that you want.",
        code="pixel_bounds_not_taken",
    )


@runtime_checkable
class ForkableRanks(Protocol):
    """A plug-in whose ranks can be forked from a process that has imported its libraries."""

    def forkable_modules(self, info: ModelInfo, device: str) -> Sequence[str]:
        """Return the modules that ranks of a model import; empty if a rank must be a new process, as with CUDA.

        Importing them must not start threads or use devices.
        """
        ...


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
        ...

    def matcher(self, grammar: str) -> TokenMatcher:
        """Return a matcher for one output, from its first token on; the grammar has passed `check`."""
        ...


@runtime_checkable
class ConstrainsOutput(Protocol):
    """A plug-in that can constrain the output of a request to a grammar."""

    def load_grammars(self, info: ModelInfo) -> Grammars | None:
        """Load the grammar compiler of a checkpoint, for checks and in generate ranks; None if it has none."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Facts of an adapter for the engine.

    Attributes:
        rank: The maximum rank of its layers.
        changes_encoder: Whether it has weights for the encoder, so that encode ranks load it, too.
    """

    rank: int
    changes_encoder: bool = False


@runtime_checkable
class TakesAdapters(Protocol):
    """A plug-in whose workers may implement `ServesAdapters`."""

    def keep_adapter(self, info: ModelInfo, path: str, kept: str, *, rank_max: int) -> AdapterFacts:
        """Copy the files of an adapter to the new folder `kept`, and check the copy without loading the model.

        Ranks read the copy, also after a restart, so that a loaded adapter does not change.

        Raises:
            CheckpointError: When a file is missing, damaged or too large, or the adapter is not supported.
        """
        ...


class AnswerPart(NamedTuple):
    """A part of the output: `content`, `reasoning`, or a complete `call`, whose text is the JSON of its arguments."""

    kind: Literal["content", "reasoning", "call"]
    text: str
    name: str = ""


class AnswerParser(Protocol):
    """Parses one output in the checkpoint's format."""

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Add the next piece of the output; return the parts that are certain."""
        ...

    def finish(self) -> Sequence[AnswerPart]:
        """Return the parts held back."""
        ...


@runtime_checkable
class ParsesAnswers(Protocol):
    """A preprocessor that parses outputs, if its checkpoint specifies the format."""

    @property
    def parses_answers(self) -> bool:
        """Whether this checkpoint specifies the format."""
        ...

    def answer_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        """Return a parser for the output after `prompt`, or its last part; `tools` are in the template's format."""
        ...


@runtime_checkable
class TellsPrompts(Protocol):
    """A plug-in whose generate workers can compute log-probabilities of prompt tokens."""

    def tells_prompts(self, info: ModelInfo, *, ranks: int) -> bool:
        """Return True if they can for this model with this number of ranks.

        It must not need more memory than the steps of the profiling run, which compute none.
        """
        ...


@runtime_checkable
class VerifiesDrafts(Protocol):
    """A plug-in whose generate workers can verify draft tokens: several decode rows per slot in a step; see `Batch`."""

    def verifies_drafts(self, info: ModelInfo, *, device: str) -> bool:
        """Return True if they can for this model on a device; recurrent layers cannot, as a state is not undone."""
        ...


@runtime_checkable
class SwapsKv(Protocol):
    """A plug-in whose generate workers may implement `SwapsBlocks`."""

    def swaps_kv(self, info: ModelInfo, *, device: str) -> bool:
        """Return True if they do for this model on a device; not with layers that have a state besides KV."""
        ...


@runtime_checkable
class LeanPreprocessing(Protocol):
    """A plug-in whose preprocessor needs fewer imports in a process that loads no model."""

    def forgo_models(self, path: str) -> None:
        """Prepare this process to load the preprocessor of a checkpoint but no model; called first.

        Raises:
            CheckpointError: When the checkpoint does not exist.
        """
        ...


@runtime_checkable
class SamplerMaker(Protocol):
    """A plug-in whose sampler can run without a model, for benchmarks."""

    def sampler(
        self, logits: npt.NDArray[np.float32], *, dtype: str = "bfloat16"
    ) -> Callable[[Sequence[tuple[int, SequenceState]]], npt.NDArray[np.int32]]:
        """Return a function that samples a token for each row of the logits, [rows, vocabulary], converted to `dtype`.

        Its argument are the special rows, as in `Batch.special`; the sampled token follows the last of each sequence.
        """
        ...


@runtime_checkable
class CompilesKernels(Protocol):
    """A plug-in that can compile the kernels of ranks before they start."""

    def compile_kernels(
        self,
        info: ModelInfo,
        settings: WorkerSettings,
        progress: Progress,
        *,
        stage: Literal["encode", "generate"],
    ) -> int:
        """Compile the kernels of a stage's ranks and cache them on disk; return the number of new kernels.

        No weights are read.

        Raises:
            CheckpointError, ConfigError: As when such a rank loads.
        """
        ...


@runtime_checkable
class CheckpointMaker(Protocol):
    """A plug-in that can also write random-weight checkpoints, for demonstrations and tests."""

    def checkpoint_sizes(self) -> Mapping[str, str]:
        """Return the sizes that `make_checkpoint` supports, each with a one-line description."""
        ...

    def make_checkpoint(
        self, path: str, size: str, *, dtype: str = "bfloat16", seed: int = 0
    ) -> int:
        """Write a checkpoint of a named size; return its number of parameters."""
        ...


@runtime_checkable
class CheckpointConverter(Protocol):
    """A plug-in that can convert a GGUF file to a checkpoint."""

    def check_conversion(self, path: str, *, dtype: str) -> None:
        """Check the arguments before the file is downloaded.

        Raises:
            CheckpointError: When a package is missing, the type is unknown, or `path` exists.
        """
        ...

    def convert_gguf(
        self, file: str, path: str, *, dtype: str, progress: Progress, keeps_levels: bool = False
    ) -> int:
        """Write the checkpoint to `path`, completely or not at all; return its number of parameters.

        Raises:
            CheckpointError: When the file cannot be converted.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDescription:
    """Facts of a checkpoint's files, without its weights.

    Attributes:
        model_type: The model type in `config.json`.
        architecture: The model class in `config.json`; empty without one.
        path: The implementation: `fused` for layers of this plug-in; for the library's layers `modules` if ranks can
            share them, else `generic`.
        parameters: Number of stored values by part, `language` and `vision`. dtypes: Number of stored values by type.
        sizes: Sizes of the language model, by their names in `config.json`. tokenizer: Files of the tokenizer; empty
        without one. chat_templates: Names of the chat templates. windows: Tokens of a sliding window, and the number of
        layers with one; these keep KV of the whole context, too. unsupported: Features of the model that are not
        supported. weights_bytes: Approximate size of the weights of a part by their type after loading: `int4`, or
        `int4/64` with a
            group size that is not the default; `auto` only for quantized checkpoints.
    """

    model_type: str
    architecture: str
    path: str
    parameters: Mapping[str, int]
    dtypes: Mapping[str, int]
    files: int
    file_bytes: int
    sizes: Mapping[str, int]
    tokenizer: str
    chat_templates: tuple[str, ...]
    windows: tuple[int, int]
    unsupported: tuple[str, ...]
    weights_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@runtime_checkable
class CheckpointDescriber(Protocol):
    """A plug-in that can describe a checkpoint, also an unsupported one."""

    def describe(self, path: str) -> CheckpointDescription:
        """Return the facts of the files.

        Raises:
            CheckpointError: When there is no checkpoint.
        """
        ...

    def check_built(self, info: ModelInfo) -> None:
        """Build the model without weights, for checks that `inspect` cannot do.

        Raises:
            CheckpointError: When it is not supported.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExamTurn:
    """One turn of a conversation with its only correct answer.

    Attributes:
        images: PNG files before the question.
    """

    images: tuple[bytes, ...]
    question: str
    answer: str


@runtime_checkable
class Examiner(Protocol):
    """A plug-in with generated pictures and questions about them, and perhaps a checkpoint trained on these."""

    def trained_checkpoint(self) -> str:
        """Return the folder of the checkpoint; empty if it is not installed, as with a wheel."""
        ...

    def exam_tasks(self) -> Sequence[str]:
        """Return the tasks that have questions."""
        ...

    def exam(self, task: str, count: int, *, seed: int = 0) -> list[tuple[ExamTurn, ...]]:
        """Return `count` conversations of a task that are not in the training data; they depend on the seed."""
        ...
