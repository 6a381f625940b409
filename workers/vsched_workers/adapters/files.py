"""Reading of LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Unsupported features that would change the output are refused, never ignored: a partly applied adapter behaves like no
model that was ever trained.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vsched.errors import CheckpointError
from vsched_workers.checkpoint.files import read_json

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = {CONFIG_FILE: 1 << 20, WEIGHTS_FILE: 4 << 30}
"""The files of an adapter, and the maximum bytes of each."""
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

EXACT: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", None),
}
"""Fields with their supported values. Other initializations change the weights of the base model as well."""

HARMLESS = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern"),  # read, or in tensors
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # likewise
        *("lora_dropout", "inference_mode", "ensure_weight_tying", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "runtime_config", "megatron_core", "qalora_group_size"),
        *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version"),
    }
)
"""Fields that may have any value: fields that are read here, and training options."""


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """The LoRA matrices of one linear layer, which add `scaling * up @ down`.

    Attributes:
        down: lora_A, [rank, inputs], on the CPU, as in the file.
        up: lora_B, [outputs, rank].
        scaling: alpha / rank, or alpha / sqrt(rank) with use_rslora.
    """

    down: torch.Tensor
    up: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read and checked; `pairs` are by the names of modules in transformers' model."""

    pairs: Mapping[str, LowRankPair]

    @property
    def rank(self) -> int:
        """The highest rank of a layer."""
        return max(pair.rank for pair in self.pairs.values())


def read_adapter(directory: Path, *, rank_max: int) -> Adapter:
    """Read an adapter.

    Raises:
        CheckpointError: When a file is missing or damaged, or the adapter has an unsupported feature.
    """
    config = _read_config(directory)
    pairs = {}
    with _reading(directory, "pt") as file:
        for module, (down, up) in _modules(file).items():
            rank = _rank_of(file, module, (down, up), rank_max)
            scaling = _scaling(config, module, rank)
            pairs[module] = LowRankPair(file.get_tensor(down), file.get_tensor(up), scaling)
    return Adapter(pairs)


def adapter_ranks(directory: Path, *, rank_max: int) -> dict[str, int]:
    """Return the rank of each module that an adapter changes, from its headers: without torch or weights.

    Raises:
        CheckpointError: As `read_adapter`.
    """
    config = _read_config(directory)
    with _reading(directory, "np") as file:
        ranks = {
            module: _rank_of(file, module, sides, rank_max)
            for module, sides in _modules(file).items()
        }
    for module, rank in ranks.items():
        _scaling(config, module, rank)
    return ranks


def names_language(module: str) -> bool:
    """Return whether a module of a vision-language model belongs to its language model, judging by its name."""
    return bool({"language_model", "text_model"} & {*module.split(".")})


def copy_adapter(directory: Path, target: Path) -> None:
    """Copy the files of an adapter to an empty folder.

    Raises:
        CheckpointError: When one is missing, too large, or cannot be copied.
    """
    _check_directory(directory)
    for name, bytes_max in FILES.items():
        try:
            size = (directory / name).stat().st_size
            if size > bytes_max:
                raise CheckpointError.of_limit(
                    f"the bytes of {name}",
                    value=size,
                    limit=bytes_max,
                    remedy="use a smaller adapter, or merge this one into its base model",
                )
            shutil.copyfile(directory / name, target / name)
        except FileNotFoundError:
            raise _missing(name) from None
        except OSError as error:
            raise CheckpointError(
                f"{name} cannot be copied ({error.strerror or type(error).__name__}). "
                "Remedy: check the file, and the room for temporary files."
            ) from error


def _missing(name: str) -> CheckpointError:
    if name == WEIGHTS_FILE:
        return CheckpointError(
            f"{WEIGHTS_FILE} is missing; pickled weights (adapter_model.bin) are never loaded. "
            "Remedy: save the adapter as safetensors."
        )
    return CheckpointError(
        f"{name} is missing. Remedy: give the directory of an adapter that PEFT saved."
    )


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointError(
            f"adapter {directory.name!r} is no directory. Remedy: give the one that holds {CONFIG_FILE}."
        )


def _read_config(directory: Path) -> Mapping[str, Any]:
    _check_directory(directory)
    config = read_json(directory, CONFIG_FILE)
    _check(config)
    return config


def _check(config: Mapping[str, Any]) -> None:
    for field, value in config.items():
        served = EXACT.get(field)
        # Unsupported fields may be present if they are empty.
        if value not in served if served else value and field not in HARMLESS:
            wanted = repr(served[0]) if served else "left out"
            raise CheckpointError(
                f"{CONFIG_FILE}: {field} is {str(value)[:80]!r}, which is not served. Remedy: use an adapter "
                f"where it is {wanted}, or merge this one into its base model."
            )
    if "peft_type" not in config:
        raise CheckpointError(
            f"{CONFIG_FILE} has no peft_type. Remedy: give the directory of an adapter that PEFT saved."
        )


def _modules(file: Any) -> dict[str, tuple[str, str]]:
    """Return the names of the two tensors of each module."""
    found: dict[str, dict[str, str]] = {}
    for name in file.keys():  # noqa: SIM118 # it is no mapping
        parts = TENSOR.fullmatch(name)
        if parts is None:
            raise CheckpointError(
                f"{WEIGHTS_FILE}: {name[:200]} is no low-rank part of a linear layer. Remedy: use an adapter "
                "of linear layers only, or merge this one into its base model."
            )
        dtype = str(file.get_slice(name).get_dtype())
        if not dtype.startswith(("F", "BF")):
            raise CheckpointError(
                f"{WEIGHTS_FILE}: {name} holds {dtype}, and only floating point is served. "
                "Remedy: save the adapter in bfloat16 or float32."
            )
        found.setdefault(parts["module"], {})[parts["side"]] = name
    for module, sides in found.items():
        if len(sides) < 2:
            raise CheckpointError(
                f"{WEIGHTS_FILE}: {module} has only one of lora_A and lora_B. Remedy: download the file again."
            )
    if not found:
        raise CheckpointError(f"{WEIGHTS_FILE} is empty. Remedy: download the file again.")
    return {module: (sides["A"], sides["B"]) for module, sides in sorted(found.items())}


def _rank_of(file: Any, module: str, sides: tuple[str, str], rank_max: int) -> int:
    """Return the rank of a module's tensors."""
    down, up = (list(file.get_slice(name).get_shape()) for name in sides)
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
        raise CheckpointError(
            f"{WEIGHTS_FILE}: lora_A {down} and lora_B {up} of {module} make no product. "
            "Remedy: download the file again."
        )
    rank = int(down[0])
    if rank > rank_max:
        raise CheckpointError.of_limit(
            f"the rank of {module}",
            value=rank,
            limit=rank_max,
            remedy="use an adapter of a lower rank, or raise adapters.rank_max",
        )
    return rank


@contextmanager
def _reading(directory: Path, framework: str) -> Iterator[Any]:
    """Open the weights; errors name the file, but no directory of the host."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(directory / WEIGHTS_FILE, framework=framework, device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise _missing(WEIGHTS_FILE) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{WEIGHTS_FILE} is corrupt or cannot be read ({type(error).__name__}). "
            "Remedy: download the file again."
        ) from error


def _scaling(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha over the tensors' rank; PEFT's first pattern that matches the end of the name wins."""
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    try:
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
                break
        scaling = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)  # type: ignore[arg-type]
    except (re.error, AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{CONFIG_FILE}: lora_alpha and alpha_pattern give no number for {module} ({error}). "
            "Remedy: download the file again."
        ) from error
    if not math.isfinite(scaling):
        raise CheckpointError(
            f"{CONFIG_FILE}: lora_alpha of {module} is {alpha}. Remedy: download the file again."
        )
    return scaling
