"""Slicing of modules and tensors into the shares of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors
import torch
from torch import nn

from tests.workers.driver import Checkpoints, inspect, load_encoder, load_generator
from vsched.errors import CheckpointError
from vsched_workers.checkpoint.random_init import SIZES
from vsched_workers.families import FAMILIES
from vsched_workers.families.sharing import Sharing
from vsched_workers.parallel.slicing import slice_module
from vsched_workers.plugin import plugin


def build(checkpoints: Checkpoints, size: str, stage: str) -> tuple[nn.Module, Sharing]:
    family, path = FAMILIES[SIZES[size].family], str(checkpoints(size))
    with torch.device("meta"):
        if stage == "encode":
            return family.build_vision(path, "sdpa"), family.vision_sharing
        return family.build_language(path, "sdpa"), family.language_sharing


class Counted:
    """A file or tensor of safetensors, which counts the bytes that are read of each tensor."""

    def __init__(self, source: Any, read: dict[str, int], name: str = "") -> None:
        self._source, self._read, self._name = source, read, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._source, attribute)

    def __enter__(self) -> Any:
        return Counted(self._source.__enter__(), self._read)

    def __exit__(self, *arguments: object) -> None:
        self._source.__exit__(*arguments)

    def get_slice(self, name: str) -> Any:
        return Counted(self._source.get_slice(name), self._read, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[:]  # type: ignore[no-any-return]

    def __getitem__(self, key: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._source[key]
        self._read[self._name] = self._read.get(self._name, 0) + tensor.nbytes
        return tensor


def count_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    opened: Any = safetensors.safe_open
    read: dict[str, int] = {}
    monkeypatch.setattr(
        safetensors, "safe_open", lambda *given, **options: Counted(opened(*given, **options), read)
    )
    return read


@pytest.mark.parametrize("stage", ["encode", "generate"])
def test_ranks_read_and_hold_their_share_only(
    checkpoints: Checkpoints, size: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reads and holds exactly half of the tensors in the table and all others."""
    module, sharing = build(checkpoints, size, stage)
    cuts = slice_module(module, sharing, ranks=2, rank=0)
    whole, _ = build(checkpoints, size, stage)
    total = {name: each.numel() * 4 for name, each in whole.state_dict().items()}
    shared = sum(total[name] for name in cuts)
    wanted = sum(total.values()) - shared // 2
    in_full = ("norm", "ln_q", "embed", "proj.bias", "fc2.bias", "mlp.2.bias")
    assert all(any(word in name for word in in_full) for name in total if name not in cuts)
    info = inspect(checkpoints(size))
    load = load_encoder if stage == "encode" else load_generator
    read: list[dict[str, int]] = []
    for rank in range(2):
        counts = count_reads(monkeypatch)
        worker = load(info, ranks=2, rank=rank, rendezvous="/nowhere/else")
        monkeypatch.undo()
        assert worker.weights_bytes == wanted
        assert sum(counts.values()) == wanted
        read.append(counts)
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("stage", "ranks", "words"),
    [
        ("generate", 4, ["num_key_value_heads is 2", "tensor_parallel to one of 1, 2."]),
        ("generate", 3, ["num_attention_heads is 4", "num_key_value_heads is 2", "3 ranks cannot"]),
        ("encode", 4, ["vision_config.num_heads is 2", "encode.tensor_parallel to one of 1, 2."]),
        ("encode", 5, ["num_heads is 2", "hidden_size is 32", "intermediate_size is 48"]),
    ],
)
def test_check_parallel_names_what_does_not_divide(
    checkpoints: Checkpoints, size: str, stage: str, ranks: int, words: list[str]
) -> None:
    info = inspect(checkpoints(size))
    for fits in (1, 2):
        plugin.check_parallel(info, stage=stage, ranks=fits)
    with pytest.raises(CheckpointError) as caught:
        plugin.check_parallel(info, stage=stage, ranks=ranks)
    assert all(word in str(caught.value) for word in words), caught.value
