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

import numba

from tests.parity.architectures import make_checkpoint
from tests.workers.backends.cpu.test_products import weight_of
from tests.workers.driver import load_generator
from tests.workers.properties import thorough
from vsched.types import SamplingParams
from vsched.worker.contract import Batch, Chunk, SequenceState, WorkerSettings
from vsched_workers.adapters.places import NOBODY, PassRows
from vsched_workers.backends.cpu import language_layers, products
from vsched_workers.backends.cpu.compiled_step.step import _products, fits
from vsched_workers.backends.cpu.kernels.compilation import compiled, kernel
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot
from vsched_workers.backends.cpu.products import QuantizedProduct, make_product
from vsched_workers.backends.cpu.quantized.integers import multiply_int8
from vsched_workers.backends.cpu.quantized.kernel import multiply
from vsched_workers.batching.kv_cache import to_int8
from vsched_workers.batching.packed_step import PromptPositions
from vsched_workers.checkpoint import random_init
from vsched_workers.plugin import plugin
from vsched_workers.quantized.layers import Quantizer
from vsched_workers.quantized.weights import quantize

Make = Callable[[str], str]

BLOCK = 16
ROWS_MAX = 32
FAR = 1500
"""Tokens of the longest context."""

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
    (multiply_int8, {**quantized("int8"), **_INT8_KV}),
    (multiply_int8, {**quantized("int4", 128), **_TWO, **_INT8_KV}),
    (multiply, {**quantized("int8", activations="float"), **_TWO}),
    *thorough(
        (multiply_int8, {**quantized("int8", 32), **_TWO}),
        (multiply_int8, quantized("int4")),
        (multiply, quantized("int4", 16)),
        (multiply, {**quantized("int4", activations="float"), **_INT8_KV}),
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


def load(path: str, *, threads: int = 1, kv_dtype: str = "auto", **given: Any) -> Any:
    """Load a model with a filled cache."""
    info = plugin.inspect(path, dtype="bfloat16", item_tokens_max=0)
    info = info.with_int8_kv if kv_dtype == "int8" else info
    settings = WorkerSettings(threads=threads, **given)
    worker: Any = load_generator(info, settings)
    worker.build_kv(blocks=ROWS_MAX * 4 + FAR // BLOCK, block_size=BLOCK)
    generator = torch.Generator().manual_seed(0)
    for kept in (*worker._cache.keys, *worker._cache.values):
        slots, heads, width = kept.shape
        of_8_bits = kept.dtype == torch.int8
        drawn = torch.randn(slots, heads, width - 2 * of_8_bits, generator=generator)
        kept.copy_(to_int8(drawn) if of_8_bits else drawn)
    return worker


def batch_of(rows: int, *, delta: int = 0) -> Batch:
    """Return a step of decode rows: one at a far position, others just after the start or the end of a block.

    Positions are `delta` behind indices in the text.
    """
    lengths = np.array([[1, BLOCK, BLOCK + 1, 40, 5][row % 5] for row in range(rows)])
    lengths[-1] = (FAR, 512)[rows % 2]
    tables = np.zeros((rows, FAR // BLOCK + 1), dtype=np.int32)
    blocks = iter(np.random.default_rng(rows).permutation(ROWS_MAX * 4 + FAR // BLOCK))
    for table, length in zip(tables, lengths, strict=True):
        for index in range(-(-length // BLOCK)):
            table[index] = next(blocks)
    sequences = [
        SequenceState(
            number=row,
            tokens=np.zeros(FAR + 1, dtype=np.int32),
            length=int(length),
            prompt_length=1,
            items=[],
            sampling=SamplingParams(temperature=0.0),
            stop_token_ids=frozenset(),
            state=PromptPositions(np.zeros((3, 1), dtype=np.int64), delta * (length > -delta)),
        )
        for row, length in enumerate(lengths)
    ]
    return Batch(
        decode_slots=np.arange(rows, dtype=np.int32),
        decode_tokens=np.random.default_rng(rows).integers(3, 290, rows).astype(np.int32),
        decode_positions=(lengths - 1).astype(np.int32),
        decode_sequences=sequences,
        block_tables=tables,
        embeddings=np.zeros((1, 1, 0), dtype=np.uint8),
        chunks=[],
        special=[],
    )


def with_chunks(batch: Batch) -> Batch:
    """Replace the last two decode rows of a step by chunks: one ends a prompt, one is the middle of a prompt."""
    chunks: list[Chunk] = []
    for slot, sequence in enumerate(batch.decode_sequences[-2:], len(batch.decode_slots) - 2):
        length, samples = sequence.length, len(chunks) == 0
        positions = PromptPositions(np.tile(np.arange(length + 1), (3, 1)), 0)
        prompt = dataclasses.replace(
            sequence,
            tokens=np.random.default_rng(slot).integers(3, 290, FAR + 1).astype(np.int32),
            prompt_length=length + 1 - samples,
            state=positions,
        )
        start = max(length - 19, 0)
        chunks.append(Chunk(slot, prompt, start, length, samples, items=[]))
    fields = ("decode_slots", "decode_tokens", "decode_positions", "decode_sequences")
    return dataclasses.replace(
        batch, chunks=chunks, **{name: getattr(batch, name)[:-2] for name in fields}
    )


def step(worker: Any, batch: Batch) -> tuple[list[int], torch.Tensor, list[torch.Tensor]]:
    """Run a step; return its tokens, hidden states and cache contents; the cache is restored."""
    cache = [*worker._cache.keys, *worker._cache.values]
    before = [each.clone() for each in cache]
    head, seen = worker._head, []

    def watch(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.clone())
        logits: torch.Tensor = head(hidden)
        return logits

    worker._head = watch
    try:
        tokens = worker.step(batch).tokens.tolist()
    finally:
        worker._head = head
    after = [each.clone() for each in cache]
    for each, old in zip(cache, before, strict=True):
        each.copy_(old)
    return tokens, seen[0], after


def check(worker: Any, monkeypatch: pytest.MonkeyPatch, *, delta: int = 0) -> None:
    """Check that steps with various numbers of rows are one call, with the bits of the separate calls."""
    whole = worker._layers._compiled_step
    spy = mock.Mock(wraps=whole, rows_max=whole.rows_max)
    few = {min(each, whole.rows_max) for each in (1, 2, 7, 17, ROWS_MAX)}
    batches = [batch_of(rows, delta=delta) for rows in sorted(few)]
    if worker._layers._compiles_chunks:
        batches += [with_chunks(batch_of(rows)) for rows in (2, 9)]
    for batch in batches:
        found = []
        for chosen in (None, spy):
            monkeypatch.setattr(worker._layers, "_compiled_step", chosen)
            found.append(step(worker, batch))
        (tokens, hidden, cache), other = found
        assert spy.call_count == 1
        spy.reset_mock()
        assert hidden.float().abs().mean() > 0.01
        assert torch.equal(hidden, other[1])
        assert tokens == other[0]
        assert all(torch.equal(*pair) for pair in zip(cache, other[2], strict=True))


def kernels_of(worker: Any) -> set[Any]:
    """Return the kernels of products in the layers of a model."""
    return {each.kernel for layer in worker._layers._layers for each in _products(layer)}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, {}) for name in MAKES),
        ("gemma2", {**_TWO, **_INT8_KV}),
        *thorough(("tiny3", _INT8_KV), ("tiny25", _TWO)),
    ],
)
def test_one_call_has_the_bits_of_many(
    name: str, given: Any, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(load(checkpoint(name), **given), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("used", "given"), QUANTIZED)
def test_one_call_has_the_bits_of_many_with_quantized_weights(
    used: Any, given: Any, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = load(checkpoint("tiny25"), **given)
    assert kernels_of(worker) == {used}
    check(worker, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, *thorough(1)])
def test_one_call_has_the_bits_of_many_if_bfloat16_is_widened(
    threads: int, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on processors without VDPBF16PS."""
    monkeypatch.setattr(products, "has_bf16_dot", lambda: False)
    monkeypatch.setattr(products, "has_tiles", lambda: False)
    worker = load(checkpoint("llama"), threads=threads)
    assert kernels_of(worker) == {multiply}
    check(worker, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, *thorough(1)])
def test_one_call_has_the_bits_of_many_if_attention_runs_on_all_threads(
    threads: int, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    worker = load(checkpoint("tiny25"), threads=threads, weights="int4", activations="int8")
    assert kernels_of(worker) >= {multiply_int8, multiply}
    assert len(kernels_of(worker)) == 2 + has_bf16_dot()
    check(worker, monkeypatch)


@pytest.mark.parametrize(("kind", "fit"), [("int4 32", True), ("int4 32~", False), ("fp8", True)])
def test_products_of_rows_in_another_order_do_not_fit(kind: str, fit: bool) -> None:
    make = functools.partial(QuantizedProduct, threads=1)
    weight, plain = make(weight_of(kind, 64, 64), None), make(weight_of("int8", 64, 64), None)
    layer = SimpleNamespace(qkv=plain, o_proj=plain, gate=plain, up=plain, down=weight)
    assert fits([layer, layer]) == fit
    assert not fits([])


def test_positions_behind_images_are_those_of_axes(
    checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of a token in the text differs from its position."""
    check(load(checkpoint("tiny25")), monkeypatch, delta=-9)


def test_other_steps_go_layer_by_layer(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with adapters, too many rows, or a subset of layers."""
    worker = load(checkpoint("tiny25"))
    whole = worker._layers._compiled_step
    spy = mock.Mock(wraps=whole, rows_max=whole.rows_max)
    monkeypatch.setattr(worker._layers, "_compiled_step", spy)
    with worker.first_layers(1):
        worker.step(batch_of(2))
    with monkeypatch.context() as patch:
        patch.setattr(worker._layers.passes, "rows", PassRows(np.full(2, NOBODY)))
        worker.step(batch_of(2))
    spy.rows_max = 1
    worker.step(batch_of(2))
    assert not spy.called
    spy.rows_max = 2
    worker.step(batch_of(2))
    assert spy.called


def test_kernel_by_address_takes_converted_arguments_and_raises_its_exceptions() -> None:
    """The caller converts its arguments to the types that the kernel was compiled for."""

    @kernel(numba.float64, None)
    def halve(value: float, out: Any) -> None:
        if value > 5:
            raise ValueError("too large")
        out[0] = value / 2

    call = halve.call

    @compiled()
    def caller(address: int, value: Any, out: Any) -> None:
        call(address, value, out)

    out = np.zeros(1, dtype=np.float32)
    address = halve.address_of(out)
    caller(address, 3, out)  # an integer that is converted to a float
    assert out[0] == 1.5
    with pytest.raises(numba.TypingError):
        caller(address, "three", out)
    with pytest.raises(ValueError, match="too large"):
        caller(address, 6, out)
