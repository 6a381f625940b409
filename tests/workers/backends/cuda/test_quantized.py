"""Quantized weights on a GPU: kernels in Triton's interpreter or on a device, torch without Triton, and layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.workers.backends.cuda.on_host import DEVICE, backend_here
from vsched_workers.backends.cuda.attention_trials import WITHIN, load_kernels
from vsched_workers.backends.cuda.products import (
    FEW_ROWS_MAX,
    DeviceProduct,
    QuantizedKernels,
    QuantizedLayer,
    quantized_trial,
)
from vsched_workers.families.decoders import Decoder
from vsched_workers.quantized.layers import QuantizedLinear
from vsched_workers.quantized.weights import QuantizedWeight, quantize

pytestmark = pytest.mark.filterwarnings("default")
KERNELS = load_kernels(QuantizedKernels)
needs_triton = pytest.mark.skipif(KERNELS is None, reason="Triton is not installed")


def drawn(outputs: int, inputs: int, kind: str, group: int, *, offsets: bool) -> QuantizedWeight:
    """Return a weight of this format with random values; a `group` of 0 is a whole row."""
    group = group or inputs
    generator = torch.Generator().manual_seed(outputs * inputs + group)
    weight = torch.randn(outputs, inputs, generator=generator)
    if kind == "fp8":
        values = weight.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(outputs, -(-inputs // group), generator=generator) + 0.5
        made = QuantizedWeight("fp8", values, scales, group, inputs, torch.float32)
    else:  # any codes are values of fp4
        made = quantize(weight, "int4" if kind == "fp4" else kind, group=group)
        made = dataclasses.replace(made, kind=kind)
    if offsets:
        shifts = torch.randn(made.scales.shape, generator=generator).to(made.scales.dtype)
        made = dataclasses.replace(made, offsets=shifts)
    return made


def differs(weight: QuantizedWeight, rows: int, **device: Any) -> float:
    """Return the relative difference of a product to that of the dequantized weight, in double precision."""
    outputs, inputs = weight.shape
    given, bias = torch.randn(rows, inputs), torch.randn(outputs)
    options = {"kernels": KERNELS, "processors": 4, **device}
    product = DeviceProduct(weight.to(DEVICE), bias.to(DEVICE), **options)
    found = product(given.to(DEVICE)).cpu().double()
    wanted = given.double() @ weight.dequantized().double().T + bias
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 80),
    inputs=st.integers(1, 300),
    kind=st.sampled_from(["int8", "int4", "fp4", "fp8"]),
    group=st.sampled_from([0, 16, 32, 48, 96, 128]),
    offsets=st.booleans(),
    rows=st.sampled_from([1, 2, 15, 16, 17, 33, FEW_ROWS_MAX, FEW_ROWS_MAX + 1]),
    processors=st.integers(1, 140),
    converts_fp8=st.booleans(),
    kernels=st.sampled_from([KERNELS, None]),
)
def test_product_is_that_of_the_dequantized_weight(
    outputs: int, inputs: int, kind: str, group: int, offsets: bool, rows: int, **device: Any
) -> None:
    """Odd numbers of inputs, short last groups, groups too small for a tile, few and many processors."""
    weight = drawn(outputs, inputs, kind, min(group, inputs), offsets=offsets)
    assert differs(weight, rows, **device) < 1e-5


@pytest.mark.parametrize("rows", [1, FEW_ROWS_MAX + 1])
def test_product_takes_inputs_in_the_order_of_groups(rows: int) -> None:
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    weight = dataclasses.replace(drawn(40, 200, "int4", 64, offsets=True), order=order)
    assert differs(weight, rows) < 1e-5


@needs_triton
def test_widened_weight_has_the_bits_of_its_values() -> None:
    for kind in ("int8", "int4", "fp4", "fp8"):
        weight = drawn(33, 101, kind, 32, offsets=True)
        assert KERNELS is not None
        product = DeviceProduct(weight.to(DEVICE), None, KERNELS, processors=4)
        assert torch.equal(product._widened(KERNELS, torch.float32).cpu(), weight.dequantized())
        chosen = torch.tensor([7, 0, 32])
        assert torch.equal(product.rows_of(chosen.to(DEVICE)).cpu(), weight.dequantized()[chosen])


@needs_triton
def test_fp8_is_converted_without_an_instruction_for_it() -> None:
    """As before compute capability 8.9, such as on an A100: every value, subnormal ones too, but NaN."""
    values = torch.tensor([each for each in range(256) if each & 127 != 127], dtype=torch.uint8)
    weight = QuantizedWeight("fp8", values[None], torch.ones(1, 1), 254, 254, torch.float32)
    assert KERNELS is not None
    product = DeviceProduct(weight.to(DEVICE), None, KERNELS, processors=4, converts_fp8=False)
    assert torch.equal(product._widened(KERNELS, torch.float32).cpu(), weight.dequantized())


class Zeros:
    """A kernel that writes zeros to one of its arguments."""

    def __init__(self, result: int) -> None:
        self.result = result

    def __getitem__(self, _grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **_: arguments[self.result].zero_()


@pytest.mark.usefixtures("properties")
@pytest.mark.parametrize("kind", ["int8", "int4", "fp4", "fp8"])
def test_trial_tells_right_kernels_from_wrong_ones(kind: str) -> None:
    # The interpreter multiplies bfloat16 as integers.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    if KERNELS is not None:
        assert quantized_trial(kind, KERNELS, dtype, DEVICE) <= WITHIN[dtype]
    assert quantized_trial(kind, QuantizedKernels(Zeros(4), Zeros(3)), dtype, DEVICE) > 0.1


class Block(nn.Module):
    """Layers of a model: a tied embedding, two linear layers of which one has a bias, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.embed_tokens = nn.Embedding(50, 64)
        self.up = nn.Linear(64, 96)
        self.norm = nn.LayerNorm(96)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.norm(self.up(self.embed_tokens(ids))))
        return hidden


@pytest.mark.usefixtures("properties")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_model_is_quantized_on_loading(kind: str) -> None:
    """Its logits equal those of the same model with dequantized weights; head and embedding share their memory."""
    torch.manual_seed(0)
    model, twin = Block().eval().requires_grad_(requires_grad=False), Block().eval()
    twin.load_state_dict(model.state_dict())
    for name, weight in twin.named_parameters():
        if weight.dim() == 2:
            of_head = name.startswith("embed")
            few = quantize(weight.detach(), "int8" if of_head else kind)
            weight.data = few.dequantized()
    before = sum(each.nbytes for each in model.parameters())
    backend = backend_here(weights=kind)
    assert set(backend.lays_out(model)) == {"up.weight", "down.weight"}
    made = backend.prepare_language(
        model.to(DEVICE), model.embed_tokens.weight, Decoder(experts=True)
    )
    ids = torch.arange(9)
    with torch.inference_mode():
        wanted = twin(ids) @ twin.embed_tokens.weight.T
        found = made.head(model(ids.to(DEVICE))).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert isinstance(model.up, QuantizedLayer)
    assert made.weights_bytes < before / (2.5 if kind == "int8" else 3)


@pytest.mark.usefixtures("properties")
def test_published_layers_stay_in_their_bits_and_others_as_they_are() -> None:
    """Hooks of a layer, such as the sum over ranks, are kept when it is replaced."""
    model = Block().eval().requires_grad_(requires_grad=False)
    weight = quantize(model.up.weight.detach(), "int4")
    model.up = QuantizedLinear(model.up, weight)
    model.up.register_forward_hook(lambda _module, _given, found: found * 2)
    plain = 2 * nn.functional.linear(model.embed_tokens.weight, weight.dequantized(), model.up.bias)
    size = backend_here().prepare_tower(model.to(DEVICE))
    assert isinstance(model.up, QuantizedLayer)
    assert type(model.down) is nn.Linear
    assert size == weight.nbytes + sum(each.nbytes for each in model.parameters())
    with torch.inference_mode():
        found = model.up(model.embed_tokens.weight).cpu()
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
