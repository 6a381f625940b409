"""A compiled step has the same bits as the same step layer by layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("numba")


from tests.parity.architectures import make_checkpoint
from tests.workers import driver
from tests.workers.backends.cpu.test_products import weight_of
from tests.workers.backends.cpu.twins import watched
from tests.workers.driver import Driver, Question, Stage
from tests.workers.properties import thorough
from tests.workers.test_language import mixed_questions
from vsched.worker.contract import Batch, Sampled
from vsched_workers.adapters.places import BASE_MODEL, PassRows
from vsched_workers.backends.cpu import language_layers, products
from vsched_workers.backends.cpu.compiled_step.step import _products, fits
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.backends.cpu.products import QuantizedProduct, make_product
from vsched_workers.backends.cpu.quantized.integers import multiply_int8
from vsched_workers.backends.cpu.quantized.kernel import multiply
from vsched_workers.checkpoint import random_init
from vsched_workers.quantized.layers import Quantizer
from vsched_workers.quantized.weights import quantize

Make = Callable[[str], str]

BLOCK = 16
LENGTHS = [*[1, BLOCK, BLOCK + 1, 40, 5] * 3, 1500]
"""Tokens of prompts: one is long, and others end just after the start or the end of a block."""

_PANELS: Mapping[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
MAKES: Mapping[str, Mapping[str, Any]] = {
    "tiny25": {},
    "tiny3": {},
    "llama": {**_PANELS, "attention_bias": True, "mlp_bias": True},
    "gemma2": {**_PANELS, "attn_logit_softcapping": 2.0},
    "gemma3_text": _PANELS,
    "granite": _PANELS,
    "olmo2": {**_PANELS, "tie_word_embeddings": True},
}
"""Checkpoints or architectures, with sizes whose weights are whole panels.

They cover positions on three axes, norms of heads and of all heads at once, biases, norms after attention and MLP,
soft-capping, sliding windows, rope frequencies by layer kind, and factors.
"""


def quantized(weights: str, group: int = 0, activations: str = "int8") -> dict[str, Any]:
    return {"weights": weights, "weights_group": group, "activations": activations}


_INT8_KV: Mapping[str, Any] = {"kv_dtype": "int8"}
_TWO: Mapping[str, Any] = {"threads": 2}
QUANTIZED: Sequence[Any] = (
    ("tiny25", {**quantized("int8"), **_INT8_KV}, multiply_int8),
    ("tiny25", {**quantized("int4", 128), **_TWO, **_INT8_KV}, multiply_int8),
    ("tiny25", {**quantized("int8", activations="float"), **_TWO}, multiply),
    *thorough(
        ("tiny25", {**quantized("int8", 32), **_TWO}, multiply_int8),
        ("tiny25", quantized("int4"), multiply_int8),
        ("tiny25", quantized("int4", 16), multiply),
        ("tiny25", {**quantized("int4", activations="float"), **_INT8_KV}, multiply),
    ),
)
"""Kernels of products by quantization; groups of 16 are not a multiple of the blocks of int8 activations."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    root = tmp_path_factory.mktemp("makes")

    def make(name: str) -> str:
        path: Path = root / name
        if not path.exists():
            if name.startswith("tiny"):
                random_init.make_checkpoint(str(path), name, dtype="bfloat16")
            else:
                make_checkpoint(name, path, **MAKES[name])
        return str(path)

    return make


@pytest.fixture(autouse=True)
def block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "BLOCK_SIZE", BLOCK)


load = functools.partial(Stage.load, attention="auto", dtype="bfloat16")


def layers_of(stage: Stage) -> Any:
    generator: Any = stage.generator
    return generator._layers


def questions_of(stage: Stage) -> list[Question]:
    """Return prompts of which one ends in every step, one with an image if the model takes them."""
    chance = np.random.default_rng(0)
    prompts = [chance.integers(3, 290, length).tolist() for length in LENGTHS]
    texts = [Question(prompt, count=count) for count, prompt in enumerate(prompts, 1)]
    return texts + (mixed_questions()[:1] if stage.info.takes_images else [])


def check(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that steps with various numbers of rows are one call, with the bits of the separate calls."""
    generator: Any = stage.generator
    layers, plain = layers_of(stage), generator.step
    whole = layers._compiled_step
    spy = mock.Mock(wraps=whole, rows_max=whole.rows_max)
    cache = [*generator._cache.keys, *generator._cache.values]

    def step(batch: Batch) -> Sampled:
        spy.reset_mock()
        sampled: Sampled = plain(batch)
        may = layers._compiled_step is spy and (layers._compiles_chunks or not batch.chunks)
        assert spy.call_count == may
        return sampled

    monkeypatch.setattr(generator, "step", step)
    found = []
    for chosen in (None, spy):
        monkeypatch.setattr(layers, "_compiled_step", chosen)
        for kept in cache:
            kept.zero_()
        hidden: list[torch.Tensor] = []
        with watched(generator, hidden, []):
            Driver(stage, chunk=512).run(questions_of(stage))
        found.append([*hidden, *(kept.clone() for kept in cache)])
    assert found[0][-1].any()
    assert all(map(torch.equal, *found))


def kernels_of(stage: Stage) -> set[Any]:
    return {each.kernel for layer in layers_of(stage)._layers for each in _products(layer)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given", "used"),
    [
        *((name, {}, None) for name in MAKES),
        ("gemma2", {**_TWO, **_INT8_KV}, None),
        *thorough(("tiny3", _INT8_KV, None), ("tiny25", _TWO, None)),
        *QUANTIZED,
    ],
)
def test_one_call_has_the_bits_of_many(
    name: str, given: Any, used: Any, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load(checkpoint(name), **given)
    assert used is None or kernels_of(stage) == {used}
    check(stage, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, *thorough(1)])
def test_one_call_has_the_bits_of_many_if_bfloat16_is_widened_or_threads_share_attention(
    threads: int, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on processors without VDPBF16PS, and as with long contexts."""
    with monkeypatch.context() as patch:
        patch.setattr(products, "has_bf16_dot", lambda: False)
        patch.setattr(products, "has_tiles", lambda: False)
        stage = load(checkpoint("llama"), threads=threads)
        assert kernels_of(stage) == {multiply}
        check(stage, patch)
    monkeypatch.setattr(language_layers, "DECODE_VALUES_MIN", 0)
    check(load(checkpoint("olmo2"), threads=threads), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, *thorough(1)])
def test_one_call_has_the_bits_of_many_if_formats_mix(
    threads: int, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of products, with several group sizes, and with offsets."""

    def linear(self: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        outputs, inputs = weight.shape
        if outputs == inputs:
            return make_product(weight, bias, threads=threads)
        groups = {704: ("int4", 16)}  # by outputs: the gate and `up`
        kind, group = groups.get(outputs, ("int8", 32) if inputs == 704 else ("int4", 128))
        made = quantize(weight.detach(), kind, group=group)
        return self._make(dataclasses.replace(made, offsets=made.scales * 2), bias)

    monkeypatch.setattr(Quantizer, "linear", linear)
    stage = load(checkpoint("tiny25"), threads=threads, weights="int4", activations="int8")
    assert kernels_of(stage) >= {multiply_int8, multiply}
    assert len(kernels_of(stage)) == 2 + has_bf16_dot()
    check(stage, monkeypatch)


@pytest.mark.parametrize(("kind", "fit"), [("int4 32", True), ("int4 32~", False), ("fp8", True)])
def test_products_of_rows_in_another_order_do_not_fit(kind: str, fit: bool) -> None:
    make = functools.partial(QuantizedProduct, threads=1)
    weight, plain = make(weight_of(kind, 64, 64), None), make(weight_of("int8", 64, 64), None)
    layer = SimpleNamespace(qkv=plain, o_proj=plain, gate=plain, up=plain, down=weight)
    assert fits([layer, layer]) == fit
    assert not fits([])


def test_other_steps_go_layer_by_layer(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with adapters, too many rows, or a subset of layers."""
    stage = load(checkpoint("tiny25"))
    layers = layers_of(stage)
    spy = mock.Mock(wraps=layers._compiled_step, rows_max=1)
    one = Driver(stage, chunk=64)
    running = one.start(0, Question(range(3, 20), count=9))
    one.step([running])
    monkeypatch.setattr(layers, "_compiled_step", spy)
    generator: Any = stage.generator
    with generator.first_layers(1):
        one.step([running])
    with monkeypatch.context() as patch:
        patch.setattr(layers.passes, "rows", PassRows(np.full(1, BASE_MODEL)))
        one.step([running])
    spy.rows_max = 0
    one.step([running])
    assert not spy.called
    spy.rows_max = 1
    one.step([running])
    assert spy.called
