"""Methods of a worker plug-in that only the commands and benchmarks call; serving does not need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vsched.errors import ConfigError
from vsched.types import ModelInfo
from vsched.worker.contract import (
    Progress,
    WorkerSettings,
    optional,
    supports,
    unsupported,
)
from vsched.worker.registry import load_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDescription:
    """Facts of a checkpoint's files, without its weights.

    Attributes:
        model_type: The model type in `config.json`.
        architecture: The model class in `config.json`; empty without one.
        path: The implementation: `fused` for layers of this plug-in; for the library's layers `modules` if ranks can
            share them, else `generic`.
        parameters: Number of stored values by part, `language` and `vision`.
        dtypes: Number of parameters by type; for quantized ones by format.
        files: Number of weight files.
        file_bytes: Size of the weight files.
        sizes: Sizes of the language model, by their names in `config.json`.
        tokenizer: Files of the tokenizer; empty without one.
        chat_templates: Names of the chat templates.
        windows: Tokens of a sliding window, and the number of layers with one; these keep KV of the whole context, too.
        unsupported: Features of the model that are not supported.
        weights_bytes: Approximate size of the weights of a part by their type after loading: `int4`, or `int4/64` with
            a group size that is not the default; `auto` only for quantized checkpoints.
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


@dataclass(frozen=True, slots=True)
class ExamTurn:
    """One turn of a conversation with its only correct answer.

    Attributes:
        images: PNG files before the question.
    """

    images: tuple[bytes, ...]
    question: str
    answer: str


class CheckpointTools:
    """Base class of plug-ins with methods for commands, next to `vsched.worker.contract.WorkerPlugin`."""

    # `vsched check`

    @optional
    def describe(self, path: str) -> CheckpointDescription:
        """Return the facts of a checkpoint's files, also of an unsupported checkpoint.

        Raises:
            CheckpointError: When there is no checkpoint.
        """
        raise unsupported(self, "descriptions of checkpoints")

    def check_built(self, info: ModelInfo) -> None:
        """Build the model without weights, for checks that `inspect` cannot do.

        Raises:
            CheckpointError: When it is not supported.
        """

    def check_settings(self, info: ModelInfo, settings: WorkerSettings, *, stage: str) -> None:
        """Check that the ranks of a stage can run with their settings on this host.

        Raises:
            ConfigError: As when such a rank loads.
        """

    # `vsched make-checkpoint`

    @optional
    def checkpoint_sizes(self) -> Mapping[str, str]:
        """Return the sizes that `make_checkpoint` supports, each with a one-line description."""
        return {}

    def make_checkpoint(
        self, path: str, size: str, *, dtype: str = "bfloat16", seed: int = 0
    ) -> int:
        """Write a random-weight checkpoint of a named size; return its number of parameters."""
        raise unsupported(self, "checkpoints with random weights")

    @optional
    def check_conversion(self, path: str, *, dtype: str) -> None:
        """Check the arguments of `convert_gguf` before the file is downloaded.

        Raises:
            CheckpointError: When a package is missing, the type is unknown, or `path` exists.
        """

    @optional
    def reads_mmproj(self, architecture: str) -> bool:
        """Return whether the vision part of a GGUF file of this architecture can be converted."""
        return False

    def convert_gguf(
        self, file: str, path: str, *, dtype: str, progress: Progress, mmproj: str = ""
    ) -> int:
        """Write the checkpoint of a GGUF file to `path`, completely or not at all; return its number of parameters.

        `mmproj` is the file of its vision part; empty if there is none.

        Raises:
            CheckpointError: When the file cannot be converted.
        """
        raise unsupported(self, "GGUF files")

    # `vsched compile`

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
        return 0

    # `vsched demo`, and benchmarks of accuracy: generated pictures and questions about them

    def trained_checkpoint(self) -> str:
        """Return the folder of a checkpoint trained on the exam; empty if it is not installed, as with a wheel."""
        return ""

    @optional
    def exam_tasks(self) -> Sequence[str]:
        """Return the tasks that have questions."""
        return ()

    def exam(self, task: str, count: int, *, seed: int = 0) -> list[tuple[ExamTurn, ...]]:
        """Return `count` conversations of a task that are not in the training data; they depend on the seed."""
        raise unsupported(self, "questions")


def load_tools(name: str, method: str, *, path: str = "plugin") -> CheckpointTools:
    """Load the plug-in of this name, which must have a method of `CheckpointTools`.

    Raises:
        ConfigError: When there is no such plug-in, or it lacks the method; `path` is its configuration key.
    """
    plugin = load_worker(name, path=path)
    if not isinstance(plugin, CheckpointTools) or not supports(plugin, method):
        raise ConfigError(
            f"{path}: the plug-in {name!r} has no method {method!r} of {__name__}.CheckpointTools. "
            "Remedy: set it to transformers."
        )
    return plugin
