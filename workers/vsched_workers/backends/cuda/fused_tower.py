"""Fused vision towers of Qwen2.5-VL and Qwen3-VL on a GPU.

transformers' modules launch about forty kernels per block, most of them over float32 copies of all rows. Here a block
is four matrix products, attention, and three kernels between them. Everything that depends on image sizes alone is
computed on the host, which does not wait for the device before the rows are complete. On an H200, an image of 720p
takes 17 ms instead of 46 ms (Qwen2.5-VL, bfloat16).

Blocks with windows attend in `triton_kernels.attend_windows`, others in torch's `varlen_attn` if it is correct on the
device, otherwise sequence by sequence. Towers that are not fused use `varlen_attn` as well: with ordinary attention,
transformers launches hundreds of kernels of a few microseconds per layer, one for every window. For implementations
with `flash` in their name it passes the arguments of flash attention for variable-length sequences instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.base import Product
from vsched_workers.backends.cuda.attention import varlen_kernel
from vsched_workers.backends.cuda.attention_trials import passes
from vsched_workers.backends.cuda.fused_layers import (
    GATE_VALUES,
    GpuNorm,
    MergedFeedForward,
    norm_of,
)
from vsched_workers.backends.cuda.products import power_of_two
from vsched_workers.backends.reference.layers import frozen
from vsched_workers.device_copies import sent
from vsched_workers.families.qwen_positions import (
    Grid,
    frame_lengths,
    patch_places,
    window_order,
)

WINDOW_MAX = 64
"""The longest sequence that `attend_windows` attends to."""

WINDOW_WARPS = {2: 4, 4: 16}
"""Warps of `attend_windows` by bytes of a value: float32 takes no tensor cores, and spills its registers with fewer."""

LAYOUTS_MAX = 16
"""Batches of images whose layout is kept on the host."""

INNER_MULTIPLE = 64
"""Inner sizes of MLPs are padded to a multiple of this if rows are not aligned for the fast kernels of cuBLAS."""

_ALIGNED_BYTES = 16
_MLPS = ((("gate_proj", "up_proj"), "down_proj"), (("linear_fc1",), "linear_fc2"))
"""Names of the first and of the last products of known MLPs."""


class VisionKernels(NamedTuple):
    """The kernels of `triton_kernels.py`, or stand-ins for them."""

    add_norm: Any
    add_layer_norm: Any
    gate: Any
    rotate_patches: Any
    attend_windows: Any


class TowerRows(NamedTuple):
    """The result of a tower, with transformers' names."""

    pooler_output: torch.Tensor
    deepstack_features: Sequence[torch.Tensor]


def fits(tower: Any) -> bool:
    """Return whether a tower has the modules that can be fused here."""
    blocks = list(getattr(tower, "blocks", ()))
    merger = getattr(tower, "merger", None)
    parts = ("patch_embed", "rotary_pos_emb", "spatial_merge_size")
    if not blocks or _norm_of_merger(merger) is None or not all(hasattr(tower, e) for e in parts):
        return False
    return all(
        all(hasattr(block.attn, name) for name in ("qkv", "proj", "num_heads", "scaling"))
        and _is_norm(block.norm1)
        and _is_norm(block.norm2)
        and _mlp_of(block.mlp) is not None
        and (hasattr(block.mlp, "linear_fc1") or _is_silu(block.mlp.act_fn))
        for block in blocks
    )


def pad_inner(tower: Any) -> None:
    """Pad the inner size of MLPs with zeros, which does not change their results, if its rows are not aligned."""
    for block in getattr(tower, "blocks", ()):
        names = _mlp_of(block.mlp)
        if names is None:
            continue
        first, last = names
        down = getattr(block.mlp, last)
        carrier = block.mlp if isinstance(down, nn.Linear) else down
        last, down = (last, down) if carrier is block.mlp else ("partial", down.partial)
        linears = [getattr(block.mlp, name) for name in first]
        size = down.in_features
        if not all(type(each) is nn.Linear for each in (*linears, down)):
            continue
        if size * down.weight.itemsize % _ALIGNED_BYTES == 0:
            continue
        missing = -size % INNER_MULTIPLE
        for name, linear in zip(first, linears, strict=True):
            setattr(block.mlp, name, _padded(linear, outputs=missing))
        setattr(carrier, last, _padded(down, inputs=missing))


def merge(tower: Any) -> None:
    """Merge the gate and up projections of every block that has them."""
    for block in tower.blocks:
        if hasattr(block.mlp, "gate_proj"):
            block.mlp = MergedFeedForward(block.mlp, ("gate_proj", "up_proj"), "down_proj")


@dataclass(slots=True)
class _TowerBlock:
    """One block: its products, norms and sizes; `activation` is None if the MLP is gated."""

    qkv: Product
    output: Product
    up: Product
    activation: Callable[[torch.Tensor], torch.Tensor] | None
    down: Product
    norm: GpuNorm
    middle: GpuNorm
    heads: int
    half: int
    scaling: float


class _Geometry(NamedTuple):
    """The sizes of a tower that the layout of a batch depends on.

    Attributes:
        merge: Patches of a token in each direction.
        window: Tokens of a window in each direction; 0 if there are none.
        positions: Rows of the table of learned position embeddings in each direction; 0 if there are none.
    """

    merge: int
    window: int
    positions: int


class _Sequences(NamedTuple):
    """Concatenated sequences: their lengths, and ends on the device, starting with 0."""

    lengths: Sequence[int]
    ends: torch.Tensor


class FusedTower:
    """Fused `forward` of a tower that `fits`; it takes the grids of images on the host."""

    def __init__(self, tower: Any, kernels: VisionKernels, *, flash: bool) -> None:
        """Take a tower, with merged products; `flash` says whether torch's `varlen_attn` is correct on its device."""
        self._kernels, self._flash = kernels, flash
        self._embedding: Any = tower.patch_embed.proj
        self._blocks = [_block_of(block) for block in tower.blocks]
        self._frequencies = tower.rotary_pos_emb.inv_freq
        self._whole = frozenset(getattr(tower, "fullatt_block_indexes", range(len(self._blocks))))
        self._positions: Any = getattr(tower, "pos_embed", None)
        levels = getattr(tower, "deepstack_visual_indexes", ())
        self._levels = dict(zip(levels, getattr(tower, "deepstack_merger_list", ()), strict=True))
        last = _norm_of_merger(tower.merger)
        assert last is not None, "the tower `fits`"
        self._last = norm_of(last)
        self._merger = _merger_of(tower.merger)
        merge = tower.spatial_merge_size
        self._geometry = _Geometry(
            merge,
            window=tower.window_size // merge // tower.patch_size
            if len(self._whole) < len(self._blocks)
            else 0,
            positions=0 if self._positions is None else tower.num_grid_per_side,
        )

    def __call__(self, pixels: torch.Tensor, grid_thw: torch.Tensor, **_: object) -> TowerRows:
        """Return the embeddings of the tokens of several images."""
        device, unit = pixels.device, self._geometry.merge**2
        hidden = self._embedded(pixels)
        layout = layout_of(tuple(map(tuple, grid_thw.tolist())), self._geometry)
        places = sent(layout.places, device)
        angles = (places[..., None].float() * self._frequencies).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        if self._positions is not None:
            hidden += self._position_rows(layout, device).to(hidden.dtype)
        if layout.order is not None:
            order = sent(layout.order, device)
            hidden = hidden.view(len(order), -1).index_select(0, order).view(hidden.shape)
        whole = _Sequences(layout.whole, sent(_ends_of(layout.whole), device))
        windows = whole
        if layout.windows:
            windows = _Sequences(layout.windows, sent(_ends_of(layout.windows), device))
        following = [block.norm for block in self._blocks[1:]] + [self._last]
        levels = []
        normed = self._add_norm(hidden, None, self._blocks[0].norm)
        for index, (block, norm) in enumerate(zip(self._blocks, following, strict=True)):
            sequences = whole if index in self._whole else windows
            attended = self._attend(block, block.qkv(normed), cos, sin, sequences)
            normed = self._add_norm(hidden, block.output(attended), block.middle)
            made = block.down(self._activated(block, block.up(normed)))
            normed = self._add_norm(hidden, made, norm)
            if index in self._levels:
                levels.append(self._levels[index](hidden))
        rows = self._merger(normed.view(len(normed) // unit, -1))
        if layout.inverse is not None:
            rows = rows.index_select(0, sent(layout.inverse, device))
        return TowerRows(rows, levels)

    def _embedded(self, pixels: torch.Tensor) -> torch.Tensor:
        # A convolution whose stride equals its kernel size is a matrix product.
        weight, bias = self._embedding.weight, self._embedding.bias
        return functional.linear(pixels.to(weight.dtype), weight.flatten(1), bias)

    def _position_rows(self, layout: Layout, device: torch.device) -> torch.Tensor:
        """Return the learned position embedding of every patch, interpolated, in float32."""
        assert layout.taps is not None
        assert layout.shares is not None
        rows: torch.Tensor = self._positions(sent(layout.taps, device))
        return (rows * sent(layout.shares, device)[..., None]).sum(1)

    def _attend(
        self,
        block: _TowerBlock,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sequences: _Sequences,
    ) -> torch.Tensor:
        """Attend within each sequence, [rows, heads * head dim]; `qkv` is overwritten."""
        heads, half, rows = block.heads, block.half, len(qkv)
        longest, dims = max(sequences.lengths), power_of_two(max(half, 16))
        if longest <= WINDOW_MAX:
            out = qkv.new_empty(rows, heads * 2 * half)
            self._kernels.attend_windows[len(sequences.lengths), heads](
                qkv, cos, sin, sequences.ends, out, block.scaling,
                HEADS=heads, HALF=half, DIMS=dims, ROWS=WINDOW_MAX,  # compiled once, also for small images
                num_warps=WINDOW_WARPS[qkv.itemsize],
            )  # fmt: skip
            return out
        self._kernels.rotate_patches[(rows,)](
            qkv, cos, sin, HEADS=heads, PAIRS=power_of_two(2 * heads), HALF=half, DIMS=dims
        )
        packed = qkv.view(rows, 3, heads, 2 * half).unbind(1)
        if self._flash:
            found = varlen(packed, sequences.ends, longest, block.scaling)
        else:
            parts = zip(*(each.split([*sequences.lengths]) for each in packed), strict=True)
            found = torch.cat([_attended(part, block.scaling) for part in parts])
        return found.flatten(1)

    def _activated(self, block: _TowerBlock, inner: torch.Tensor) -> torch.Tensor:
        if block.activation is not None:
            return block.activation(inner)
        width = inner.shape[1] // 2
        gated = inner.new_empty(len(inner), width)
        self._kernels.gate[len(inner), -(-width // GATE_VALUES)](
            inner, gated, width, ACTIVATION="SILU", WIDTH=GATE_VALUES
        )
        return gated

    def _add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, norm: GpuNorm
    ) -> torch.Tensor:
        """Add to rows in place, and return their norms."""
        normed, width = torch.empty_like(hidden), hidden.shape[1]
        kernel = self._kernels.add_norm if norm.bias is None else self._kernels.add_layer_norm
        kernel[(len(hidden),)](
            hidden,
            hidden if added is None else added,
            *((norm.weight,) if norm.bias is None else (norm.weight, norm.bias)),
            normed,
            width,
            norm.eps,
            HAS_ADDED=added is not None,
            WIDTH=power_of_two(width),
        )
        return normed


@dataclass(frozen=True)
class Layout:
    """The part of a batch's computation that depends on the sizes of its images alone, on the host.

    Attributes:
        places: Row and column of each patch in its image, window by window, [patches, 2].
        whole: The number of patches of each frame of each image.
        windows: The same of each window; empty if there are none.
        order: The tokens in the order of windows, or None.
        inverse: The places of tokens in that order.
        taps: The rows of the table of position embeddings that each patch takes a share of, [patches, 4], or None.
        shares: The shares.
    """

    places: npt.NDArray[np.int64]
    whole: Sequence[int]
    windows: Sequence[int]
    order: npt.NDArray[np.int64] | None
    inverse: npt.NDArray[np.int64] | None
    taps: npt.NDArray[np.int64] | None
    shares: npt.NDArray[np.float32] | None


@functools.lru_cache(LAYOUTS_MAX)
def layout_of(sizes: tuple[Grid, ...], geometry: _Geometry) -> Layout:
    """Return the layout of a batch of images with these grids."""
    merge, unit = geometry.merge, geometry.merge**2
    places = patch_places(sizes, merge)
    taps = shares = order = inverse = None
    windows: list[int] = []
    if geometry.window:
        order, counts = window_order(sizes, merge, geometry.window)
        inverse = np.argsort(order)
        windows = [unit * count for count in counts.tolist()]
        places = places.reshape(-1, unit, 2)[order].reshape(-1, 2)
    if geometry.positions:
        taps, shares = _interpolation(sizes, geometry)
    return Layout(places, frame_lengths(sizes), windows, order, inverse, taps, shares)


def _interpolation(
    sizes: Sequence[Grid], geometry: _Geometry
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the four rows of the table that each patch lies between, and its share of each."""
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    taps, shares = get_vision_interpolation_indices_and_weights(
        torch.tensor(sizes),
        num_grid_per_side=geometry.positions,
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=geometry.merge,
    )
    return taps.numpy(), shares.numpy()


def _ends_of(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _attended(part: Sequence[torch.Tensor], scaling: float) -> torch.Tensor:
    """Attend within one sequence with queries, keys and values [rows, heads, head dim]."""
    query, key, value = (each.transpose(0, 1)[None] for each in part)
    seen = functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    return seen[0].transpose(0, 1)


def trial(kernels: VisionKernels, dtype: torch.dtype, device: str) -> float:
    """Return the largest difference to torch's operations, for sizes that are not powers of two."""
    heads, half, lengths = 3, 12, (16, 5, 12)
    rows, width = sum(lengths), 80
    seed = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seed).to(device, dtype)

    hidden, added, weight, bias = drawn(rows, width), drawn(rows, width), drawn(width), drawn(width)
    total = (hidden + added).float()
    pairs = []
    for kernel, more, wanted in (
        (kernels.add_norm, (), functional.rms_norm(total, (width,), eps=1e-6) * weight.float()),
        (
            kernels.add_layer_norm,
            (bias,),
            functional.layer_norm(total, (width,), weight.float(), bias.float(), 1e-6),
        ),
    ):
        normed, given = torch.empty_like(hidden), hidden.clone()
        kernel[(rows,)](given, added, weight, *more, normed, width, 1e-6, HAS_ADDED=True, WIDTH=128)
        pairs += [(normed, wanted), (given, total)]
    gate_up, gated = drawn(rows, 2 * width), torch.empty_like(hidden)
    opened = functional.silu(gate_up[:, :width].float()) * gate_up[:, width:].float()
    kernels.gate[rows, 1](gate_up, gated, width, ACTIVATION="SILU", WIDTH=GATE_VALUES)
    pairs.append((gated, opened))
    qkv, angles = drawn(rows, 3 * heads * 2 * half), torch.rand(rows, half).to(device)
    cos, sin = angles.cos(), angles.sin()
    first, second = qkv.float().view(rows, 3, heads, 2, half)[:, :2].unbind(3)
    wide = cos[:, None, None], sin[:, None, None]
    turned = torch.cat(
        (first * wide[0] - second * wide[1], second * wide[0] + first * wide[1]), dim=-1
    ).to(dtype)
    values = qkv.view(rows, 3, heads, 2 * half)[:, 2]
    parts = zip(*(each.split(lengths) for each in (*turned.unbind(1), values)), strict=True)
    wanted = torch.cat([_attended([each.float() for each in part], 0.3) for part in parts])
    ends, out = sent(_ends_of(lengths), device), qkv.new_empty(rows, heads * 2 * half)
    kernels.attend_windows[len(lengths), heads](
        qkv, cos, sin, ends, out, 0.3, HEADS=heads, HALF=half, DIMS=16, ROWS=16
    )
    pairs.append((out, wanted.flatten(1)))
    kernels.rotate_patches[(rows,)](qkv, cos, sin, HEADS=heads, PAIRS=8, HALF=half, DIMS=16)
    pairs.append((qkv.view(rows, 3, heads, -1)[:, :2], turned))
    apart = torch.stack([(found.float() - right.float()).abs().max() for found, right in pairs])
    return float(apart.max())  # NaN if one is


def _block_of(block: Any) -> _TowerBlock:
    attention, mlp = block.attn, block.mlp
    gated = isinstance(mlp, MergedFeedForward)
    return _TowerBlock(
        qkv=attention.qkv,
        output=attention.proj,
        up=mlp.gate_up_proj if gated else mlp.linear_fc1,
        activation=None if gated else mlp.act_fn,
        down=mlp.down_proj if gated else mlp.linear_fc2,
        norm=norm_of(block.norm1),
        middle=norm_of(block.norm2),
        heads=attention.num_heads,
        half=attention.qkv.out_features // (6 * attention.num_heads),
        scaling=attention.scaling,
    )


def _is_norm(module: Any) -> bool:
    return hasattr(module, "variance_epsilon") or (
        type(module) is nn.LayerNorm and module.bias is not None
    )


def _norm_of_merger(merger: Any) -> Any:
    """Return the norm of patches that a merger starts with; None if it has another structure."""
    norm = getattr(merger, "ln_q", None) or getattr(merger, "norm", None)
    known = hasattr(merger, "mlp") or all(
        hasattr(merger, name) for name in ("linear_fc1", "act_fn", "linear_fc2")
    )
    return (
        norm
        if known and _is_norm(norm) and not getattr(merger, "use_postshuffle_norm", False)
        else None
    )


def _merger_of(merger: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a merger without its norm."""
    if hasattr(merger, "mlp"):
        found: Callable[[torch.Tensor], torch.Tensor] = merger.mlp
        return found
    return lambda rows: merger.linear_fc2(merger.act_fn(merger.linear_fc1(rows)))


def _is_silu(module: Any) -> bool:
    ramp = torch.linspace(-6, 6, 25)
    return torch.allclose(module(ramp), functional.silu(ramp))


def _mlp_of(mlp: Any) -> tuple[Sequence[str], str] | None:
    """Return the names of the first products of an MLP, and of its last; None if they are not known."""
    for first, last in _MLPS:
        if all(hasattr(mlp, name) for name in (*first, last)):
            return first, last
    return None


def _padded(linear: nn.Linear, *, outputs: int = 0, inputs: int = 0) -> nn.Linear:
    """Return a linear layer with additional outputs and inputs, all zero."""
    sizes = linear.in_features + inputs, linear.out_features + outputs
    made = nn.Linear(*sizes, linear.bias is not None, device="meta")
    made.weight = frozen(functional.pad(linear.weight, (0, inputs, 0, outputs)))
    if linear.bias is not None:
        made.bias = frozen(functional.pad(linear.bias, (0, outputs)))
    return made


FLASH = "vsched_vision_flash"

_TRIAL_HEADS, _TRIAL_DIM, _TRIAL_LENGTHS = 2, 80, (64, 16, 200)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend within each of the concatenated sequences.

    Shape: query, key and value [1, heads, rows, head dim]; cu_seq_lens_q int32 [sequences + 1]; returns [1, rows,
    heads, head dim].
    """
    if cu_seq_lens_q is None or max_length_q is None:
        # This version of transformers has split the row into its sequences.
        seen = functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        return seen.transpose(1, 2), None
    packed = [each[0].transpose(0, 1) for each in (query, key, value)]
    return varlen(packed, cu_seq_lens_q, int(max_length_q), scaling)[None], None


def varlen(
    packed: Sequence[torch.Tensor], bounds: torch.Tensor, longest: int, scaling: float
) -> torch.Tensor:
    """Attend with queries, keys and values [rows, heads, head dim] each."""
    kernel, options = varlen_kernel("scale")
    bounds = bounds.int()
    out: torch.Tensor = kernel(*packed, bounds, bounds, longest, longest, scale=scaling, **options)
    return out


def use_flash(tower: nn.Module, settings: WorkerSettings, dtype: torch.dtype) -> bool:
    """Have a tower attend with one call per layer, if the kernel is correct on the device; return whether it does."""
    if dtype == torch.float32 or settings.attention == "exact" or not runs(settings.device, dtype):
        return False
    switch(tower)
    return True


def switch(tower: nn.Module) -> None:
    """Register `attend` with transformers as `FLASH`, and switch a tower, built with another implementation, to it."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLASH, attend)
    # Not earlier: while building, transformers tries to import a package for names with `flash`.
    config: Any = tower.config
    config._attn_implementation = FLASH  # noqa: SLF001  # as transformers sets it


def runs(device: str, dtype: torch.dtype) -> bool:
    """Return whether the kernel's results are correct on the device, by a trial."""
    chance = torch.Generator().manual_seed(0)
    shape = (3, sum(_TRIAL_LENGTHS), _TRIAL_HEADS, _TRIAL_DIM)
    inputs: Any = torch.randn(shape, generator=chance).to(device=device, dtype=dtype)
    ends = torch.tensor([0, *_TRIAL_LENGTHS]).cumsum(0)
    parts = [
        functional.scaled_dot_product_attention(*part.transpose(1, 2)).transpose(0, 1)
        for part in inputs.split(_TRIAL_LENGTHS, dim=1)
    ]

    def apart() -> float:
        found = varlen(inputs.unbind(0), ends.to(device), max(_TRIAL_LENGTHS), _TRIAL_DIM**-0.5)
        return float((found - torch.cat(parts)).abs().max())

    return passes(apart, dtype, without="vision: attention window by window")
