"""Compilation of kernels in child processes before a model is loaded: each needed one once; failures are harmless."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

pytest.importorskip("numba")

import msgspec
import torch

from tests.patience import PATIENCE_S
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu import compiling as compiling_module
from vsched_workers.backends.cpu import products
from vsched_workers.backends.cpu.compiling import (
    Need,
    compile_ahead,
    expected_s,
    language_needs,
    missing,
    needs,
    tower_needs,
)
from vsched_workers.checkpoint.random_init import make_checkpoint
from vsched_workers.families.decoders import Decoder
from vsched_workers.quantized.layers import HEAD_FORMAT

GREEDY, NORM = needs("greedy sampler"), needs("norm")
LEFT = """
import sys
from numba.core import event
class Tells(event.Listener):
    def on_start(self, begun): pass
    def on_end(self, ended):
        if ended.data["dispatcher"].py_func.__module__.startswith("vsched"):
            print(ended.data["dispatcher"].py_func.__qualname__, ended.data["args"])
import msgspec
from vsched.worker.contract import WorkerSettings
from vsched_workers.plugin import plugin
path, dtype, given = sys.argv[1:]
info = plugin.inspect(path, dtype=dtype, item_tokens_max=0)
settings = msgspec.json.decode(given, type=WorkerSettings)
for stage in ("encode", "generate"):
    plugin.compile_kernels(info, settings, lambda what, share: None, stage=stage)
event.register("numba:compile", Tells())
plugin.load_encoder(info, settings, lambda what, share: None)
worker = plugin.load_generator(info, settings, lambda what, share: None)
worker.build_kv(blocks=8, block_size=16)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folder for kernels."""
    monkeypatch.setattr(compiling_module, "kernel_folder", lambda: tmp_path)
    return tmp_path


class Children:
    """Replaces the compiling processes: records the requested kernels, and compiles a given number of them."""

    def __init__(self, folder: Path, *, fails: int = -1) -> None:
        self.requested: list[list[Need]] = []
        self.stdin = self
        self.stdout: list[bytes] = []
        self._fails = fails

    def __call__(self, command: list[str], **_: object) -> Children:
        assert command[:3] == [sys.executable, "-m", compiling_module.__name__]
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, given: bytes) -> None:
        self.requested.append(msgspec.json.decode(given, type=list[Need]))
        self.stdout = [b"%d\n" % n for n in range(len(self.requested[-1])) if n != self._fails]

    def close(self) -> None:
        pass


@pytest.fixture
def compiling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Children]:
    def make(**given: Any) -> Children:
        made = Children(folder, **given)
        monkeypatch.setattr(subprocess, "Popen", made)
        return made

    return make


def quiet(_what: str, _share: float) -> None:
    pass


def test_each_kernel_is_compiled_once_and_its_progress_is_reported(
    folder: Path, compiling: Callable[..., Children]
) -> None:
    processes, reported = compiling(), []
    wanted = [GREEDY, NORM, GREEDY]
    assert compile_ahead(wanted, lambda what, share: reported.append((what, share))) == 2
    assert processes.requested == [[GREEDY, NORM]]
    assert [share for _, share in reported] == [0.0, pytest.approx(1 / 3), 1.0]
    assert reported[0][0].startswith("compiling 2 kernels for this processor, once, about 1 s")
    assert compile_ahead(wanted, quiet) == 0
    assert compile_ahead([needs("low rank")], quiet) == 1
    assert processes.requested[1:] == [[needs("low rank")]]


def test_a_kernel_that_was_not_compiled_is_tried_again(
    folder: Path, compiling: Callable[..., Children]
) -> None:
    compiling(fails=0)
    compile_ahead([GREEDY, NORM], quiet)
    assert missing([GREEDY, NORM], folder) == [GREEDY]


def test_nothing_is_compiled_ahead_where_it_cannot_be_kept(
    folder: Path, compiling: Callable[..., Children], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = compiling()
    monkeypatch.setattr(compiling_module, "kernel_folder", lambda: None)
    assert compile_ahead([GREEDY], quiet) == 0
    monkeypatch.setattr(compiling_module, "kernel_folder", lambda: Path("/proc"))
    assert compile_ahead([GREEDY], quiet) == 0
    assert processes.requested == []


def test_expected_time_is_that_of_the_longest_or_of_all_shared_out() -> None:
    sampler, attention = needs("sampler"), needs("decode attention", "float32", "bfloat16")
    assert expected_s([sampler, NORM], 2) == sampler.seconds
    total = sampler.seconds + attention.seconds
    assert expected_s([sampler, attention], 1) == total


def test_needs_follow_settings() -> None:
    def of(dtype: torch.dtype, **given: Any) -> set[str]:
        settings = WorkerSettings(**given)
        config = SimpleNamespace(head_dim=64)
        return {each.kernel for each in language_needs(settings, dtype, dtype, config, None, ())}

    assert of(torch.float32) == {"sampler", "decode attention of modules"}
    assert "product" in of(torch.float32, weights="int4")
    for activations in ("float", "int8"):
        settings = WorkerSettings(weights="int4", activations=activations)
        config, dtype = SimpleNamespace(head_dim=64), torch.float32
        words = {each.words for each in language_needs(settings, dtype, dtype, config, None, ())}
        assert ("float32", "int4", activations) in words
    assert "low rank" in of(torch.bfloat16, adapters=1)
    assert [*tower_needs(WorkerSettings(), torch.float32, None)] == []


def test_tiles_are_needed_if_weights_are_widened_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For each kind of weights, on any processor."""
    monkeypatch.setattr(products, "has_tiles", lambda: True)
    config = SimpleNamespace(head_dim=64, hidden_act="silu")

    def of(dtype: torch.dtype = torch.bfloat16, **given: Any) -> set[Need]:
        settings = WorkerSettings(weights="int4", threads=2, **given)
        wanted = [
            *language_needs(settings, dtype, dtype, config, Decoder(), ["fp8"]),
            *tower_needs(settings, dtype, None),
        ]
        return {each for each in wanted if each.kernel == "product in tiles"}

    both = {needs("product in tiles", kind) for kind in ("int4", "fp8", HEAD_FORMAT)}
    assert of() == of(activations="float") == both
    assert of(activations="int8") == of(torch.float32) == of(deterministic=True) == set()


def test_attention_of_many_rows_is_needed_as_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles if available and allowed; other head dimensions are left to torch."""

    def of(size: int = 64, *, deterministic: bool = False) -> set[str]:
        config = SimpleNamespace(head_dim=size, hidden_act="silu")
        settings, dtype = WorkerSettings(deterministic=deterministic), torch.bfloat16
        found = {
            each.kernel for each in language_needs(settings, dtype, dtype, config, Decoder(), ())
        }
        return found & {"attention in tiles", "prefill attention"}

    for has_tiles, kernel in ((True, "attention in tiles"), (False, "prefill attention")):
        monkeypatch.setattr(compiling_module, "has_tiles", lambda has=has_tiles: has)
        assert of() == {kernel}
        assert of(20) == of(deterministic=True) == set()


def test_products_and_the_step_in_one_call_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    config, dtype = SimpleNamespace(head_dim=64, hidden_act="silu"), torch.bfloat16

    def of(kinds: Sequence[str] = (), **given: Any) -> set[Need]:
        settings = WorkerSettings(**given)
        return {*language_needs(settings, dtype, dtype, config, Decoder(), kinds)}

    whole = needs("product", "bfloat16", "int4", "int8")
    assert whole in of(weights="int4", activations="int8")
    assert whole in of(["int4"], activations="int8")
    assert whole not in of(weights="int4", activations="float")
    for has_dot in (True, False):
        monkeypatch.setattr(compiling_module, "has_bf16_dot", lambda has_dot=has_dot: has_dot)
        assert (needs("product of panels") in of()) == has_dot
        assert (needs("product", "bfloat16", "bfloat16") in of()) != has_dot
    step = needs("decode step", "bfloat16")
    assert step in of() & of(weights="int8") & of(deterministic=True)
    assert step not in of(ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize(
    ("size", "dtype", "given"),
    [
        pytest.param("nano25", "bfloat16", {}, marks=pytest.mark.thorough),
        pytest.param("nano25", "float32", {"weights": "int4"}, marks=pytest.mark.thorough),
        ("nano3", "bfloat16", {"weights": "int8", "threads": 2, "adapters": 1}),
        ("nano25", "bfloat16", {"weights": "int4"}),
    ],
    ids=["bfloat16", "int4 in float32", "int8 and adapters", "int4"],
)
def test_ranks_find_all_that_they_need(
    size: str, dtype: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """Real processes compile; afterwards nothing is missing."""
    make_checkpoint(str(tmp_path / size), size, dtype=dtype)
    settings = msgspec.json.encode(WorkerSettings(**given)).decode()
    reported = subprocess.run(
        [sys.executable, "-c", LEFT, str(tmp_path / size), dtype, settings],
        capture_output=True,
        text=True,
        check=True,
    )
    assert reported.stdout == ""
