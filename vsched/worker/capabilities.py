"""What a worker or a plug-in may be able to do beyond its contract; whoever can is recognised by its methods."""

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
        pauses: Whether it can here. What it holds while it waits comes on top of what a step needs.
    """

    @property
    def pauses(self) -> bool: ...

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Take a batch, as `encode` does, without working on it. One that was not finished is dropped."""
        ...

    def advance(self, layers: int) -> bool:
        """Work on the batch for `layers` layers of about equal length, 0 for the rest; return whether it is done.

        A layer is what the worker takes for one: pieces of about equal length, the same on all ranks. Rows and errors
        are those of `encode`; after an error there is no batch any more.
        """
        ...


def can_pause(worker: EncodeWorker) -> TypeGuard[PausingEncode]:
    """Return whether an encode worker can pause within a batch, here and now."""
    return isinstance(worker, PausingEncode) and worker.pauses


@runtime_checkable
class SparseEncode(Protocol):
    """An encode worker that can show what a batch takes with a part of its work."""

    def sparsely(self) -> AbstractContextManager[None]:
        """Until the context ends, batches take the memory that they always do; their rows are of no use then."""
        ...


def encoding_sparsely(worker: EncodeWorker) -> AbstractContextManager[None]:
    """Return the context in which a worker shows what batches take; a worker that cannot encodes them."""
    return worker.sparsely() if isinstance(worker, SparseEncode) else nullcontext()


@runtime_checkable
class FrugalSteps(Protocol):
    """A generate worker that can show the peak of its longest steps in a fraction of their time.

    Attributes:
        frugal: Every layer gives back all that it took, and takes what grows with a sequence for one sequence after
            the other. So two layers need what all need, and the longest sequence stands for any number of them.
    """

    @property
    def frugal(self) -> bool: ...

    def first_layers(self, count: int) -> AbstractContextManager[None]:
        """Run only the first `count` layers until the context ends; the results are of no use then."""
        ...


@runtime_checkable
class SwapsBlocks(Protocol):
    """A generate worker that can copy KV blocks to host memory of its own, and back; see `SwapsKv`."""

    def build_swap(self, blocks: int) -> None:
        """Set host memory aside for so many blocks of the KV cache that stands; it comes with no later one.

        Raises:
            DeviceOutOfMemory: When the host has not as much.
        """
        ...

    def swap(self, out: npt.NDArray[np.int32], back: npt.NDArray[np.int32]) -> None:
        """Copy blocks to places, then places to blocks; called between two steps.

        Shape: int32 [copies, 2]; of `out` the block and the place, of `back` the place and the block. No place of `out`
        and no block of `back` is there twice; a block may be in both.

        Order: a copy out reads what all steps before have written, and a step after this call finds what was copied
        back. The call may return before, as long as no later step writes to a block that is still read.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out.
        """
        ...


@runtime_checkable
class CollectiveWorker(Protocol):
    """A worker that shares its model with other ranks, and can tell them that it has failed."""

    def abort(self) -> None:
        """Fail the collectives of the group: peers that wait in one, or come to one, raise `DeviceOutOfMemory`.

        Called where this rank failed outside of the worker and its peers may have gone on. The next step meets the
        peers anew, as after a step that failed by itself. Does nothing when they are to meet anew already.
        """
        ...


@runtime_checkable
class PeriodicWork(Protocol):
    """A worker with collective work that is due now and then, such as to balance experts over ranks.

    The engine says when, in the decision log, so every rank runs it between the same two steps. It says so after an
    interval in which there were steps, or when rank 0 asks for it, never in every iteration.
    """

    def hooks(self) -> Mapping[str, float]:
        """Return the works by name and the interval of each in seconds, 0: only when it is asked for.

        Asked once, when the worker is loaded; the same on every rank.
        """
        ...

    def run_hook(self, name: str) -> None:
        """Do one of them; every rank does. An error ends the rank, and with it the group."""
        ...

    def wanted_hooks(self) -> Sequence[str]:
        """Return the works that should be done soon. Asked after every step, and answered on rank 0 alone."""
        ...


@runtime_checkable
class CountsKernels(Protocol):
    """A worker whose kernels are compiled on this machine, and read from disk where they were before."""

    def kernels_here(self) -> Mapping[str, int]:
        """Return for how many kinds of arguments this process has each kernel by now: compiled, or read from disk."""
        ...


@runtime_checkable
class UsesThreads(Protocol):
    """A worker that computes on a CPU, and may change the number of threads while it runs."""

    def threads_here(self) -> int:
        """Return the number of threads that this process computes with now; 0 if it computes on another device."""
        ...


@runtime_checkable
class ServesAdapters(Protocol):
    """A worker that adds adapters to its layers, and takes them away, between two steps of its log.

    An adapter is known by a number, which is used once. `WorkerSettings.adapters` says how many there may be at a time.
    What is computed for a row depends on the adapter of its request and not on those of the rows beside it.

    Attributes:
        adapter_bytes: What was taken of the device's memory for all that there may be; not among `weights_bytes`.
    """

    @property
    def adapter_bytes(self) -> int: ...

    def add_adapter(self, number: int, path: str) -> None:
        """Read an adapter and add it, all of it or nothing; what it changes in the other stage is left to that.

        Raises:
            CheckpointError: When it cannot be read, or does not fit this model.
            DeviceOutOfMemory: When the device's memory ran out.
        """
        ...

    def add_trial_adapter(self, number: int) -> None:
        """Add one of the highest rank to all layers that can have one, for the profiling run."""
        ...

    def remove_adapter(self, number: int) -> None:
        """Take an adapter away; does nothing where it is not there."""
        ...


def adapter_bytes(worker: object) -> int:
    """Return what a worker has taken of the device's memory for adapters."""
    return worker.adapter_bytes if isinstance(worker, ServesAdapters) else 0


@contextmanager
def trial_adapter(worker: object) -> Iterator[int]:
    """Add an adapter of the highest rank until the context ends; yield its number, 0 where there may be none.

    While memory is measured there is no other yet, so its number is free.
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
    """A plug-in that knows which batches of images need the most memory of its encoder."""

    def worst_batches(
        self, info: ModelInfo, *, items: int, tokens: int, pixels_max: int
    ) -> list[list[ImagePlan]]:
        """Return the candidates for the worst legal batch under every cap; the worst is among them.

        `items` is the most images of a batch and `tokens` the most tokens, 0 for no such cap; an image of more tokens
        runs alone. `pixels_max` is the largest image that is let in, before it is resized; `info.item_tokens_max`
        caps the tokens of one. Empty when no image is legal.
        """
        ...


@runtime_checkable
class SampleImages(Protocol):
    """A plug-in whose encoder takes what it takes for real images only: masks and indices are among their arrays."""

    def sample_arrays(self, info: ModelInfo, plan: ImagePlan) -> Arrays:
        """Return the arrays of an image of a plan that is one of `worst_batches`; zeros will do where it has none."""
        ...


class PixelBounds(msgspec.Struct, frozen=True):
    """Between how many pixels a request wants an image that was resized to lie; None is as the checkpoint has it."""

    min_pixels: int | None = None
    max_pixels: int | None = None


@runtime_checkable
class BoundsImages(Protocol):
    """A preprocessor, or what its recipe makes, that resizes an image to lie between two numbers of pixels."""

    def bounded(self, bounds: PixelBounds, *, pixels_max: int) -> Self:
        """Return the same with other bounds; its `settings_digest` tells them apart where they are others.

        `pixels_max` is the largest image that is let in, before it is resized: what the memory of encoding was measured
        with.

        Raises:
            RequestRefused: When images within these bounds could have more or fewer tokens than was measured, or the
                checkpoint's images have no such bounds.
        """
        ...


def no_pixel_bounds() -> RequestRefused:
    """Word the refusal of bounds for images that are resized by other rules, or not at all."""
    return RequestRefused(
        "the model's images are not resized between two numbers of pixels. "
        "Remedy: leave min_pixels and max_pixels out, and send images of the size that you want.",
        code="pixel_bounds_not_taken",
    )


@runtime_checkable
class ForkableRanks(Protocol):
    """A plug-in whose ranks can be forked from a process that has imported its libraries."""

    def forkable_modules(self, info: ModelInfo, device: str) -> Sequence[str]:
        """Return what ranks of a model import on a device; empty where a rank must be a new process, as with CUDA.

        Importing them starts no thread and touches no device.
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
    """A plug-in that can hold the output of a request to a grammar."""

    def load_grammars(self, info: ModelInfo) -> Grammars | None:
        """Load the grammar compiler of a checkpoint, for checks and in generate ranks; None if it has none."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What an engine must know of an adapter.

    Attributes:
        rank: The highest rank of a layer.
        changes_encoder: Whether it changes how images are encoded, so that encode ranks have to have it, too.
    """

    rank: int
    changes_encoder: bool = False


@runtime_checkable
class TakesAdapters(Protocol):
    """A plug-in whose workers may be `ServesAdapters`."""

    def keep_adapter(self, info: ModelInfo, path: str, kept: str, *, rank_max: int) -> AdapterFacts:
        """Copy the files of an adapter to the new folder `kept`, and check the copy without loading the model.

        Ranks read the copy, whenever they start: what an adapter is does not change while it is loaded.

        Raises:
            CheckpointError: When a file is missing, damaged or too large, or it asks for what is not served.
        """
        ...


class AnswerPart(NamedTuple):
    """A piece of an answer: `content`, `reasoning`, or a whole `call`, whose text is the JSON of its arguments."""

    kind: Literal["content", "reasoning", "call"]
    text: str
    name: str = ""


class AnswerParser(Protocol):
    """Reads one answer, as a checkpoint says how."""

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Take the next piece of the answer; return what is certain."""
        ...

    def finish(self) -> Sequence[AnswerPart]:
        """Return what was held back."""
        ...


@runtime_checkable
class ParsesAnswers(Protocol):
    """A preprocessor that reads answers, if its checkpoint says how."""

    @property
    def parses_answers(self) -> bool:
        """Whether this checkpoint says how."""
        ...

    def answer_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        """Return what reads the answer to a prompt, or to the end of one; `tools` as the template is shown them."""
        ...


@runtime_checkable
class TellsPrompts(Protocol):
    """A plug-in whose generate workers can tell the log-probabilities of prompt tokens."""

    def tells_prompts(self, info: ModelInfo, *, ranks: int) -> bool:
        """Return whether they can for this model, where so many ranks share it.

        It must not need more memory than the steps of the profiling run, which tell of no prompt.
        """
        ...


@runtime_checkable
class VerifiesDrafts(Protocol):
    """A plug-in whose generate workers can run drafts: several decode rows of a slot in one step; see `Batch`."""

    def verifies_drafts(self, info: ModelInfo, *, device: str) -> bool:
        """Return whether they can, for this model on a device; not where layers keep a state: no row takes it back."""
        ...


@runtime_checkable
class SwapsKv(Protocol):
    """A plug-in whose generate workers may be `SwapsBlocks`; another is never asked to swap."""

    def swaps_kv(self, info: ModelInfo, *, device: str) -> bool:
        """Return whether they are, for this model on a device; not where layers keep a state beside KV."""
        ...


@runtime_checkable
class LeanPreprocessing(Protocol):
    """A plug-in whose preprocessor comes with less in a process that loads no model."""

    def forgo_models(self, path: str) -> None:
        """Prepare this process to load the preprocessor of a checkpoint and never a model; called before anything else.

        Raises:
            CheckpointError: When there is no such checkpoint.
        """
        ...


@runtime_checkable
class SamplerMaker(Protocol):
    """A plug-in whose sampler can be run without a model, to be measured."""

    def sampler(
        self, logits: npt.NDArray[np.float32], *, dtype: str = "bfloat16"
    ) -> Callable[[Sequence[tuple[int, SequenceState]]], npt.NDArray[np.int32]]:
        """Return what chooses a token for each row of the logits, [rows, vocabulary], which become of this type.

        It takes the special rows, as in `Batch.special`; the token to choose follows the last of each sequence.
        """
        ...


@runtime_checkable
class CompilesKernels(Protocol):
    """A plug-in that can compile what ranks need on this machine before there are any."""

    def compile_kernels(
        self,
        info: ModelInfo,
        settings: WorkerSettings,
        progress: Progress,
        *,
        stage: Literal["encode", "generate"],
    ) -> int:
        """Compile what the ranks of a stage need and keep it on disk; return how many kernels were not there.

        No weights are read.

        Raises:
            CheckpointError, ConfigError: As when such a rank loads.
        """
        ...


@runtime_checkable
class CheckpointMaker(Protocol):
    """A plug-in that can also write random-weight checkpoints, for demonstrations and tests."""

    def checkpoint_sizes(self) -> Mapping[str, str]:
        """Return the sizes that `make_checkpoint` knows, each with a line of what it is."""
        ...

    def make_checkpoint(
        self, path: str, size: str, *, dtype: str = "bfloat16", seed: int = 0
    ) -> int:
        """Write a checkpoint of a named size; return its number of parameters."""
        ...


@runtime_checkable
class CheckpointConverter(Protocol):
    """A plug-in that can make a checkpoint from a GGUF file."""

    def check_conversion(self, path: str, *, dtype: str) -> None:
        """Check what can be checked before the file is there.

        Raises:
            CheckpointError: When a package is missing, the type is unknown, or there is something at `path`.
        """
        ...

    def convert_gguf(
        self, file: str, path: str, *, dtype: str, progress: Progress, keeps_levels: bool = False
    ) -> int:
        """Write the checkpoint to `path`, all of it or nothing; return its number of parameters.

        Raises:
            CheckpointError: When the file cannot be converted.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDescription:
    """What the files of a checkpoint say, read without its weights.

    Attributes:
        model_type: The family, as its `config.json` names it.
        architecture: The class of model that wrote it; empty where it does not say.
        path: How it would be computed: `fused` by layers of this plug-in, or by the library's: `modules` where ranks
            can share them, or `generic`.
        parameters: Stored values by part, `language` and `vision`.
        dtypes: Stored values by type.
        sizes: What `config.json` says of the language model, by its own names.
        tokenizer: The files that the tokenizer is read from; empty where there is none to read.
        chat_templates: The names of the chat templates.
        windows: Tokens of a sliding window, and how many layers have one; they keep KV for the whole context, too.
        unsupported: What the model could do elsewhere, and not here.
        weights_bytes: About what the weights of a part take, by what they are made into on loading: as `int4`, or as
            `int4/64` with other groups than usual; `auto` only where the checkpoint has them quantised.
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
    """A plug-in that can tell what a checkpoint is, also one that it cannot serve."""

    def describe(self, path: str) -> CheckpointDescription:
        """Return what the files say.

        Raises:
            CheckpointError: When there is no checkpoint.
        """
        ...

    def check_built(self, info: ModelInfo) -> None:
        """Build the model without weights, for what `inspect` cannot tell of it.

        Raises:
            CheckpointError: When it cannot be served.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExamTurn:
    """One turn of a conversation, and the only answer to it that counts as right.

    Attributes:
        images: PNG files, shown before the question.
    """

    images: tuple[bytes, ...]
    question: str
    answer: str


@runtime_checkable
class Examiner(Protocol):
    """A plug-in with drawn pictures and questions about them, and perhaps a checkpoint that has learned to answer."""

    def trained_checkpoint(self) -> str:
        """Return the folder of the checkpoint; empty where it is not installed, such as from a wheel."""
        ...

    def exam_tasks(self) -> Sequence[str]:
        """Return the tasks that there are questions for."""
        ...

    def exam(self, task: str, count: int, *, seed: int = 0) -> list[tuple[ExamTurn, ...]]:
        """Return `count` conversations of a task that the checkpoint was not trained on; others with another seed."""
        ...
