"""Adapters saved by PEFT that are refused: unsupported features, damaged files, layers that a model lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.each_case import each_case
from tests.parity.architectures import make_checkpoint
from tests.workers.adapters.peft_adapters import make_adapter
from tests.workers.driver import inspect, load_generator
from vsched.errors import CheckpointError
from vsched_workers.adapters.files import CONFIG_FILE, WEIGHTS_FILE, read_adapter

# PEFT uses an attribute that transformers 6 removes.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

RANK, WIDTH = 4, 64
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module", params=["stablelm", "llama"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint, and of an adapter of it, `plain`."""
    root = tmp_path_factory.mktemp("adapters")
    make_checkpoint(request.param, root)
    make_adapter(root, root / "plain", 0)
    return root


@pytest.fixture(scope="module")
def worker(saved: Path) -> Any:
    return load_generator(inspect(saved), adapters=2, adapter_rank_max=RANK)


def spoilt(saved: Path, folder: Path, **config: Any) -> Path:
    fields = json.loads((saved / "plain" / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**fields, **config}))
    (folder / WEIGHTS_FILE).write_bytes((saved / "plain" / WEIGHTS_FILE).read_bytes())
    return folder


def save_tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = {f"base_model.model.{name}": torch.ones(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / WEIGHTS_FILE)


def test_too_many_adapters_equal_numbers_and_high_ranks_are_refused(
    saved: Path, worker: Any
) -> None:
    plain = str(saved / "plain")
    with pytest.raises(CheckpointError, match=r"the rank of model.*: value 4, limit 3. Remedy: "):
        read_adapter(saved / "plain", rank_max=RANK - 1)
    worker.add_adapter(1, plain)
    with pytest.raises(CheckpointError, match="there is an adapter 1"):
        worker.add_adapter(1, plain)
    worker.add_adapter(2, plain)
    with pytest.raises(CheckpointError, match="adapters: value 3, limit 2. Remedy: remove one"):
        worker.add_adapter(3, plain)
    for number in (1, 2):
        worker.remove_adapter(number)


NO_NUMBER = "lora_alpha and alpha_pattern give no number"


@each_case(
    ("change", "message"),
    [
        ({"bias": "all"}, "bias is .*not served. Remedy: "),
        ({"use_dora": True}, "use_dora is .*not served. Remedy: "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*not served. Remedy: "),
        ({"peft_type": "IA3"}, "peft_type is .*not served. Remedy: "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is .*not served. Remedy: "),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is .*not served. Remedy: "),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is .*not served. Remedy: "),
        ({"a_field_of_tomorrow": {"strength": 2}}, "a_field_of_tomorrow is .*not served. Remedy: "),
        ({"lora_alpha": "much"}, NO_NUMBER),
        ({"lora_alpha": 10**400}, NO_NUMBER),
        ({"lora_alpha": 1e999}, "lora_alpha of .* is inf"),
        ({"alpha_pattern": {"(": 2}}, NO_NUMBER),
    ],
)
def test_unsupported_fields_that_change_the_output_are_refused_by_name(
    saved: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Also a scaling that is no number."""
    with pytest.raises(CheckpointError, match=message):
        read_adapter(spoilt(saved, tmp_path, **change), rank_max=RANK)


@each_case(
    ("shapes", "message"),
    [
        ({}, "is empty"),
        ({f"{Q}.lora_A.weight": (2, WIDTH)}, "only one of lora_A and lora_B"),
        ({f"{Q}.lora_A.weight": (2, WIDTH), f"{Q}.lora_B.weight": (WIDTH, 3)}, "make no product"),
        ({f"{Q}.lora_magnitude_vector": (WIDTH,)}, "no low-rank part of a linear layer"),
        ({"model.embed_tokens.lora_embedding_A": (2, 128)}, "no low-rank part"),
    ],
)
def test_tensors_that_are_no_pairs_are_refused(
    saved: Path, tmp_path: Path, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    save_tensors(spoilt(saved, tmp_path), shapes)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path, rank_max=RANK)


def test_missing_and_corrupt_files_are_reported_without_paths(saved: Path, tmp_path: Path) -> None:
    spoilt(saved, tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match=f"^{WEIGHTS_FILE} is corrupt"):
        read_adapter(tmp_path, rank_max=RANK)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"^{WEIGHTS_FILE} is missing; pickled"):
        read_adapter(tmp_path, rank_max=RANK)
    (tmp_path / CONFIG_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"^{CONFIG_FILE} is missing"):
        read_adapter(tmp_path, rank_max=RANK)
    with pytest.raises(CheckpointError, match="^adapter 'none' is no directory"):
        read_adapter(tmp_path / "none", rank_max=RANK)


@each_case(
    ("module", "outputs", "inputs", "message"),
    [
        ("model.layers.7.self_attn.q_proj", WIDTH, WIDTH, "which the model lacks"),
        ("model.layers.1.self_attn.q_proj", 16, 32, r"has \[32, 16\] inputs and outputs"),
        ("model.embed_tokens", WIDTH, WIDTH, "a Embedding here"),
        ("lm_head", 300, WIDTH, "lm_head, the output projection.*Remedy"),
    ],
)
def test_an_adapter_that_does_not_fit_leaves_nothing_behind(
    saved: Path, worker: Any, tmp_path: Path, module: str, outputs: int, inputs: int, message: str
) -> None:
    """Also if its other layers fit: both places are free again."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, ends in ((Q, (WIDTH, WIDTH)), (module, (outputs, inputs))):
        shapes[f"{name}.lora_A.weight"] = (2, ends[1])
        shapes[f"{name}.lora_B.weight"] = (ends[0], 2)
    save_tensors(spoilt(saved, tmp_path), shapes)
    for _ in range(3):
        with pytest.raises(CheckpointError, match=message):
            worker.add_adapter(1, str(tmp_path))
    for number in (1, 2):
        worker.add_adapter(number, str(saved / "plain"))
    for number in (1, 2):
        worker.remove_adapter(number)
