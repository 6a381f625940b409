"""Slicing of modules and tensors into the shares of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors
import torch
from torch import nn

from vsched.errors import CheckpointError
from vsched.worker.contract import WorkerSettings
from vsched_workers.checkpoint.random_init import SIZES
from vsched_workers.checkpoint.weights import WeightIndex, load_head, load_tensors
from vsched_workers.families import FAMILIES
from vsched_workers.families.sharing import Sharing, Split
from vsched_workers.parallel.slicing import Cut, cut_of, slice_module
from vsched_workers.plugin import plugin


def test_cut_of_a_fused_layer_takes_each_part_by_itself() -> None:
    """Queries, keys and values of a rank's heads, not the first rows of the stack."""
    assert cut_of(24, ranks=2, rank=1, parts=3).spans == ((4, 8), (12, 16), (20, 24))
    assert cut_of(24, ranks=2, rank=1).spans == ((12, 24),)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("dimension", "parts"), [(0, 1), (1, 1), (0, 3)])
def test_cuts_of_all_ranks_make_the_whole(ranks: int, dimension: int, parts: int) -> None:
    whole = torch.arange(24 * 24).reshape(24, 24)
    cuts = [
        cut_of(24, ranks=ranks, rank=rank, dimension=dimension, parts=parts)
        for rank in range(ranks)
    ]
    shares = [cut.read(whole).chunk(parts, dimension) for cut in cuts]
    by_part = [share[part] for part in range(parts) for share in shares]
    assert torch.equal(torch.cat(by_part, dimension), whole)
    assert all(cut.shape_before((24 // ranks,) * 2)[dimension] == 24 for cut in cuts)


def test_cut_asserts_the_shape_that_it_promises() -> None:
    """A tensor that is shorter than the cut, or a module of another size, is an error."""
    cut = Cut(dimension=0, whole=8, spans=((4, 8),))
    with pytest.raises(AssertionError, match="is not cut to"):
        cut.read(torch.zeros(6, 2))
    with pytest.raises(AssertionError, match="is not cut to"):
        cut.shape_before((5, 2))
    with pytest.raises(AssertionError, match="do not divide by 3 ranks"):
        cut_of(8, ranks=3, rank=0)


def test_slice_module_asserts_that_every_name_is_there() -> None:
    """A renamed layer is not silently kept whole, and a number of heads must be divisible."""
    module = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(AssertionError, match="down"):
        slice_module(module, Sharing({"0": Split.COLUMN, "down": Split.ROW}, ()), ranks=2, rank=0)
    module.heads = 3  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="heads does not divide by 2 ranks"):
        slice_module(module, Sharing({"0": Split.ROW}, (), {"": ("heads",)}), ranks=2, rank=0)


def build(checkpoints: Callable[[str], Path], size: str, stage: str) -> tuple[nn.Module, Sharing]:
    family, path = FAMILIES[SIZES[size].family], str(checkpoints(size))
    with torch.device("meta"):
        if stage == "encode":
            return family.build_vision(path, "sdpa"), family.vision_sharing
        return family.build_language(path, "sdpa"), family.language_sharing


@pytest.mark.parametrize("stage", ["encode", "generate"])
def test_slice_module_shapes(checkpoints: Callable[[str], Path], size: str, stage: str) -> None:
    """Every layer in the table has half of one dimension; all other tensors are unchanged."""
    whole, sharing = build(checkpoints, size, stage)
    half, _ = build(checkpoints, size, stage)
    cuts = slice_module(half, sharing, ranks=2, rank=1)
    assert cuts
    before = {name: tuple(each.shape) for name, each in whole.state_dict().items()}
    for name, tensor in half.state_dict().items():
        wanted = list(before[name])
        if name in cuts:
            wanted[cuts[name].dimension] //= 2
            assert cuts[name].shape_before(tuple(tensor.shape)) == before[name]
        assert list(tensor.shape) == wanted, name
    left = {name for name in before if name not in cuts and name.endswith("weight")}
    assert not any("_proj" in name or "qkv" in name or "mlp" in name for name in left)


class Recorder:
    """A replacement of `safetensors.safe_open` that counts the bytes read of each tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[str, int] = {}
        opened: Any = safetensors.safe_open

        class File:
            def __init__(inner, *arguments: Any, **options: Any) -> None:  # noqa: N805
                inner._file: Any = opened(*arguments, **options)

            def __enter__(inner) -> Any:  # noqa: N805
                inner._file.__enter__()
                return inner

            def __exit__(inner, *arguments: object) -> None:  # noqa: N805
                inner._file.__exit__(*arguments)

            def keys(inner) -> Any:  # noqa: N805
                return inner._file.keys()

            def get_tensor(inner, name: str) -> torch.Tensor:  # noqa: N805
                return self.count(name, inner._file.get_tensor(name))

            def get_slice(inner, name: str) -> Any:  # noqa: N805
                return Slice(name, inner._file.get_slice(name))

        class Slice:
            def __init__(inner, name: str, source: Any) -> None:  # noqa: N805
                inner._name, inner._source = name, source
                inner.get_shape = source.get_shape

            def __getitem__(inner, key: Any) -> torch.Tensor:  # noqa: N805
                return self.count(inner._name, inner._source[key])

        monkeypatch.setattr(safetensors, "safe_open", File)

    def count(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.read[name] = self.read.get(name, 0) + tensor.numel() * tensor.element_size()
        return tensor


@pytest.mark.parametrize("stage", ["encode", "generate"])
def test_ranks_read_and_hold_their_share_only(
    checkpoints: Callable[[str], Path], size: str, stage: str, monkeypatch: pytest.MonkeyPatch
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
    info = plugin.inspect(str(checkpoints(size)), dtype="float32", item_tokens_max=0)
    load = plugin.load_encoder if stage == "encode" else plugin.load_generator
    read: list[dict[str, int]] = []
    for rank in range(2):
        recorder = Recorder(monkeypatch)
        settings = WorkerSettings(ranks=2, rank=rank, rendezvous="/nowhere/else")
        worker = load(info, settings, lambda _label, _fraction: None)
        monkeypatch.undo()
        assert worker.weights_bytes == wanted
        assert sum(recorder.read.values()) == wanted
        read.append(recorder.read)
    assert read[0] == read[1]


@pytest.fixture
def untied(checkpoints: Callable[[str], Path], tmp_path: Path) -> WeightIndex:
    """Return a checkpoint with an untied head and an embedding of 6 rows."""
    from safetensors.torch import save_file

    head = torch.arange(18.0).reshape(6, 3)
    save_file({"lm_head.weight": head}, tmp_path / "model.safetensors")
    return WeightIndex.open(tmp_path)


def test_load_head_reads_the_own_part_of_the_vocabulary(
    untied: WeightIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Module()
    model.embed_tokens = nn.Embedding(6, 3)
    recorder = Recorder(monkeypatch)
    head = load_head(
        model,
        untied,
        dtype=torch.float32,
        device="cpu",
        cut=cut_of(6, ranks=2, rank=1),
    )
    assert head.tolist() == [[9, 10, 11], [12, 13, 14], [15, 16, 17]]
    assert recorder.read == {"lm_head.weight": 3 * 3 * 4}


def test_load_head_that_is_tied_takes_no_memory(tmp_path: Path) -> None:
    model = nn.Module()
    model.embed_tokens = nn.Embedding(6, 3)
    cut = cut_of(6, ranks=2, rank=1)
    index = WeightIndex(tmp_path, {}, tied=True)
    head = load_head(model, index, dtype=torch.float32, device="cpu", cut=cut)
    embedding = model.embed_tokens.weight
    assert torch.equal(head, embedding[3:])
    assert head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()


def test_load_tensors_names_the_whole_shape(untied: WeightIndex) -> None:
    with pytest.raises(CheckpointError, match=r"has shape \[6, 3\], config.json asks for \[8, 3\]"):
        load_tensors(
            untied,
            {"a": ("lm_head.weight", (4, 3))},
            dtype=torch.float32,
            device="cpu",
            report=lambda _: None,
            cuts={"a": cut_of(8, ranks=2, rank=0)},
        )


@pytest.mark.parametrize(
    ("stage", "ranks", "words"),
    [
        (
            "generate",
            4,
            ["text_config.num_key_value_heads is 2", "tensor_parallel to one of 1, 2."],
        ),
        ("generate", 3, ["num_attention_heads is 4", "num_key_value_heads is 2", "3 ranks cannot"]),
        ("encode", 4, ["vision_config.num_heads is 2", "encode.tensor_parallel to one of 1, 2."]),
        ("encode", 5, ["num_heads is 2", "hidden_size is 32", "intermediate_size is 48"]),
    ],
)
def test_check_parallel_names_what_does_not_divide(
    checkpoints: Callable[[str], Path], size: str, stage: str, ranks: int, words: list[str]
) -> None:
    info = plugin.inspect(str(checkpoints(size)), dtype="auto", item_tokens_max=0)
    with pytest.raises(CheckpointError) as caught:
        plugin.check_parallel(info, stage=stage, ranks=ranks)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", ["encode", "generate"])
def test_check_parallel_lets_pass_what_divides(
    checkpoints: Callable[[str], Path], size: str, stage: str, ranks: int
) -> None:
    info = plugin.inspect(str(checkpoints(size)), dtype="auto", item_tokens_max=0)
    plugin.check_parallel(msgspec.structs.replace(info, dtype="float32"), stage=stage, ranks=ranks)
