"""The plug-in object that the entry-point group `vsched.workers` refers to.

Torch and transformers are imported by the methods that need them, so listing plug-ins and inspecting a checkpoint are
quick.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vsched.checkpoint_tools import CheckpointDescription, CheckpointTools, ExamTurn
from vsched.types import ModelInfo
from vsched.worker.contract import (
    AdapterFacts,
    Arrays,
    DeviceSurvey,
    EncodeWorker,
    GenerateWorker,
    Grammars,
    ImagePlan,
    Preprocessor,
    Progress,
    WorkerPlugin,
    WorkerSettings,
)
from vsched.worker.memory import memory_errors

if TYPE_CHECKING:
    from PIL import Image

TRAINED = Path(__file__).parents[1] / "demo-model"
"""The trained checkpoint, next to the package in the repository; wheels do not contain it."""

LEAN_TORCH = "vsched_workers.lean_torch"
"""Imported before other modules by CPU ranks that use no modules of transformers."""

RANK_MODULES = (
    "vsched_workers.backends.cpu.backend",
    "vsched_workers.batching.sliced_run",
    "vsched_workers.checkpoint.grammars",
    "vsched_workers.language",
    "vsched_workers.memory.worst_case",
    "vsched_workers.vision",
)
"""Modules that all CPU ranks import."""

OWN_MODULES = ("vsched_workers.families.own_modules",)
"""Modules that CPU ranks import in addition, for a family with modules of its own in place of transformers'."""


class TransformersPlugin(WorkerPlugin, CheckpointTools):
    """Workers over transformers modelling code; see `vsched.worker.contract.WorkerPlugin`."""

    def __init__(self) -> None:
        self._samples: dict[ImagePlan, Arrays] = {}

    def inspect(self, path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
        """Read the checkpoint's facts without loading weights."""
        from vsched_workers.checkpoint.facts import inspect_checkpoint

        return inspect_checkpoint(path, dtype=dtype, item_tokens_max=item_tokens_max)

    def check_parallel(self, info: ModelInfo, *, stage: str, ranks: int) -> None:
        """Check that a stage, `encode` or `generate`, can be shared by this number of ranks."""
        from vsched_workers.checkpoint.facts import check_parallel

        check_parallel(info, stage=stage, ranks=ranks)

    def forgo_models(self, path: str) -> None:
        """Hide torch from transformers, unless torchvision processes the checkpoint's images."""
        from vsched_workers.checkpoint.files import checkpoint_directory
        from vsched_workers.checkpoint.images import forgo_torch

        forgo_torch(checkpoint_directory(path))

    def forkable_modules(self, info: ModelInfo, device: str) -> Sequence[str]:
        """Return the modules that CPU ranks import; none for CUDA, which cannot be used after a fork."""
        if device != "cpu":
            return ()
        from vsched_workers.families import FAMILIES, language_family

        family = language_family(info.family, info.path, WorkerSettings(device=device))
        if family is not None and family.own_modules:
            return [LEAN_TORCH, *RANK_MODULES, *OWN_MODULES]
        names = [info.family]
        if info.family not in FAMILIES:
            from transformers.models.auto.configuration_auto import model_type_to_module_name

            from vsched_workers.checkpoint.facts import model_types

            modules = map(model_type_to_module_name, model_types(info))
            names = list(dict.fromkeys(modules))
        return [*RANK_MODULES, *(f"transformers.models.{name}.modeling_{name}" for name in names)]

    def survey_devices(self, *, timeout_s: float) -> DeviceSurvey:
        """Return the CUDA devices that torch can use, from a child process."""
        from vsched_workers.device_survey import survey_devices

        return survey_devices(timeout_s=timeout_s)

    def compile_kernels(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress, *, stage: str
    ) -> int:
        """Compile the kernels of a stage's ranks and cache them on disk; return the number that was not cached yet."""
        from vsched_workers.rank_worker import compile_kernels

        return compile_kernels(info, settings, progress, stage=stage)

    def load_preprocessor(self, info: ModelInfo) -> Preprocessor:
        """Load tokenizer, chat template and image processor, clamped to `info.item_tokens_max`."""
        from vsched_workers.checkpoint.preprocess import load_preprocessor

        return load_preprocessor(info)

    def load_grammars(self, info: ModelInfo) -> Grammars | None:
        """Return the grammar compiler for a checkpoint's vocabulary."""
        from vsched_workers.checkpoint.grammars import load_grammars

        return load_grammars(info)

    def computes_prompt_logprobs(self, info: ModelInfo, *, ranks: int) -> bool:
        """Return True: all models support prompt log-probabilities, as no path needs the logits of all rows at once."""
        return True

    def keep_adapter(self, info: ModelInfo, path: str, kept: str, *, rank_max: int) -> AdapterFacts:
        """Copy an adapter, and check the copy's headers."""
        from vsched_workers.adapters.files import adapter_ranks, copy_adapter, names_language
        from vsched_workers.families import FAMILIES

        Path(kept).mkdir(mode=0o700, parents=True)
        copy_adapter(Path(path), Path(kept))
        ranks = adapter_ranks(Path(kept), rank_max=rank_max)
        family = FAMILIES.get(info.family)
        if family is not None:
            encodes = any(name.startswith(tuple(family.vision_prefixes)) for name in ranks)
        else:
            # Without the model, the names of its parts are unknown; ranks without adapted layers ignore it.
            encodes = info.takes_images and not all(map(names_language, ranks))
        return AdapterFacts(rank=max(ranks.values()), changes_encoder=encodes)

    def verifies_drafts(self, info: ModelInfo, *, device: str) -> bool:
        """Return whether steps can verify draft tokens: on a CPU, except for recurrent models."""
        return device.startswith("cpu") and not info.state_bytes

    def swaps_kv(self, info: ModelInfo, *, device: str) -> bool:
        """Return whether KV blocks can be swapped to host memory: not for models with a recurrent state."""
        del device
        return not info.state_bytes

    def load_encoder(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> EncodeWorker:
        """Load the vision tower alone."""
        with memory_errors("loading the vision tower", remedy="raise encode.memory_limit"):
            from vsched_workers.backends.choice import check_device
            from vsched_workers.vision import load_encoder

            check_device(settings.device, key="encode.device")
            return load_encoder(info, settings, progress)

    def load_generator(
        self, info: ModelInfo, settings: WorkerSettings, progress: Progress
    ) -> GenerateWorker:
        """Load the language model alone."""
        with memory_errors("loading the language model", remedy="raise generate.memory_limit"):
            from vsched_workers.backends.choice import check_device
            from vsched_workers.language import load_generator

            check_device(settings.device, key="generate.device")
            return load_generator(info, settings, progress)

    def worst_batches(
        self, info: ModelInfo, *, items: int, tokens: int, pixels_max: int
    ) -> list[list[ImagePlan]]:
        """Return the candidates for the worst legal batch under every cap."""
        from vsched_workers.families import FAMILIES
        from vsched_workers.memory.worst_case import worst_batches, worst_images

        if info.family not in FAMILIES:
            self._samples = worst_images(info, pixels_max=pixels_max) if pixels_max > 0 else {}
            return [[plan] for plan in self._samples]
        return worst_batches(info, items=items, tokens=tokens, pixels_max=pixels_max)

    def sample_arrays(self, info: ModelInfo, plan: ImagePlan) -> Arrays:
        """Return the arrays of an image of one of the worst batches; each can be taken once."""
        return self._samples.pop(plan, {})

    def checkpoint_sizes(self) -> Mapping[str, str]:
        """Return the names of the sizes for `make_checkpoint`, with a one-line summary each."""
        from vsched_workers.checkpoint.random_init import SIZES

        return {name: size.summary for name, size in SIZES.items()}

    def make_checkpoint(
        self, path: str, size: str, *, dtype: str = "bfloat16", seed: int = 0
    ) -> int:
        """Write a random-weight checkpoint of a named size; return its number of parameters."""
        from vsched_workers.checkpoint.random_init import make_checkpoint

        return make_checkpoint(path, size, dtype=dtype, seed=seed)

    def describe(self, path: str) -> CheckpointDescription:
        """Describe a checkpoint from its files, even one that cannot be served."""
        from vsched_workers.checkpoint.description import describe_checkpoint

        return describe_checkpoint(path)

    def check_built(self, info: ModelInfo) -> None:
        """Check the model that is built from a checkpoint, without its weights."""
        from vsched_workers.families import FAMILIES

        if info.family not in FAMILIES:
            from transformers.utils import logging

            from vsched_workers.batching import paged_attention
            from vsched_workers.language import build_any

            logging.set_verbosity_error()  # its warnings are part of the error that follows
            paged_attention.register()
            build_any(info)

    def check_settings(self, info: ModelInfo, settings: WorkerSettings, *, stage: str) -> None:
        """Check the device of a stage, on a CPU the types of weights, activations and KV cache, and groups of ranks."""
        import torch

        from vsched_workers.backends.choice import check_device, choose_backend
        from vsched_workers.rank_worker import with_checkpoint_weights

        check_device(settings.device, key=f"{stage}.device")
        if stage == "generate":
            settings = with_checkpoint_weights(info, settings)
        if settings.device == "cpu":
            kv_dtype = info.kv_dtype if stage == "generate" else "auto"
            choose_backend(settings, getattr(torch, info.dtype), kv_dtype)
        if settings.quantizes and settings.ranks > 1:
            from vsched_workers.language import check_language_share
            from vsched_workers.vision import check_vision_share

            check = check_language_share if stage == "generate" else check_vision_share
            check(info, settings)

    def check_conversion(self, path: str, *, dtype: str) -> None:
        """Check that a GGUF file can be converted here and written to this path."""
        from vsched_workers.checkpoint.gguf import check_conversion

        check_conversion(path, dtype=dtype)

    def reads_mmproj(self, architecture: str) -> bool:
        """Return whether it is a vision-language architecture whose vision part can be read."""
        from vsched_workers.checkpoint.gguf_vision import KINDS

        return architecture in KINDS

    def convert_gguf(
        self, file: str, path: str, *, dtype: str, progress: Progress, mmproj: str = ""
    ) -> int:
        """Write the checkpoint of a GGUF file; return its number of parameters."""
        from vsched_workers.checkpoint.gguf import convert_in_child

        return convert_in_child(file, path, dtype=dtype, progress=progress, mmproj=mmproj)

    def trained_checkpoint(self) -> str:
        """Return the folder of the trained checkpoint, or an empty string if there is none."""
        return str(TRAINED) if (TRAINED / "model.safetensors").is_file() else ""

    def exam_tasks(self) -> Sequence[str]:
        """Return the tasks that the demo model was trained for."""
        from demo_training.samples import TASKS

        return TASKS

    def exam(self, task: str, count: int, *, seed: int = 0) -> list[tuple[ExamTurn, ...]]:
        """Return held-out conversations of a task."""
        from demo_training.samples import held_out

        return [
            tuple(
                ExamTurn(tuple(_png(image) for image in turn.images), turn.question, turn.answer)
                for turn in sample.turns
            )
            for sample in held_out(task, count, seed=seed)
        ]


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


plugin = TransformersPlugin()
