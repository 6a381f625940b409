"""Decoder-only language models and Qwen2.5-VL's tower without transformers, whose import takes most of a rank's start.

Modules and tensors have the same names as transformers', and the results are bit-identical:
`tests/workers/families/test_own_modules.py` compares them.

Most of that import is torch's compiler, its multi-device tensors and sympy: 4 of 7 s of CPU time for the ranks of
tiny25. Rejected: stand-ins for the modules that transformers imports, with half of the gain and broken by each new
version; importing transformers after the start, since the first request would wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vsched_workers.families.qwen import QwenVisionSettings
from vsched_workers.families.qwen_positions import frame_lengths, patch_places, window_order
from vsched_workers.families.text_settings import TextSettings


class RmsNorm(nn.Module):
    """RMS norm; the normalized row is rounded before the product with the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the norm of rows [..., width]."""
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(rows.dtype)


class GatedFeedForward(nn.Module):
    """A gated feed-forward."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the same width."""
        gated: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))
        return gated


def frequencies(theta: float, values: int) -> torch.Tensor:
    """Return the rotary frequencies for `values` values, float32 [values / 2]."""
    # On the meta device, this would make torch import its compiler, which takes two seconds.
    with torch.device("cpu"):
        return 1.0 / (theta ** (torch.arange(0, values, 2, dtype=torch.float) / values))


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to heads, whose halves form the rotated pairs; all three broadcast together."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


Angles = tuple[torch.Tensor, torch.Tensor]


class AxesRotary(nn.Module):
    """Cosines and sines of mrope positions: each axis has sections of the frequencies."""

    inv_freq: torch.Tensor
    rope_type = "default"
    attention_scaling = 1.0

    def __init__(self, config: TextSettings) -> None:
        super().__init__()
        self.config = config
        self._sections: list[int] = config.rope_parameters["mrope_section"]
        made = frequencies(config.rope_parameters["rope_theta"], config.head_dim)
        self.register_buffer("inv_freq", made, persistent=False)

    @torch.no_grad()
    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> Angles:
        """Return [batch, rows, head dim] each, of the type of `like`, for positions [3, batch, rows]."""
        angles = positions[..., None].float() * self.inv_freq
        return self._in_sections(angles.cos()).to(like.dtype), self._in_sections(angles.sin()).to(
            like.dtype
        )

    def _in_sections(self, by_axis: torch.Tensor) -> torch.Tensor:
        parts = by_axis.split(self._sections, dim=-1)
        half = torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1)
        return torch.cat((half, half), dim=-1)


class TextRotary(nn.Module):
    """Cosines and sines of text positions."""

    inv_freq: torch.Tensor
    attention_scaling = 1.0

    def __init__(self, config: TextSettings) -> None:
        super().__init__()
        made = frequencies(config.rope_parameters["rope_theta"], config.head_dim)
        if config.rope_parameters["rope_type"] == "llama3":
            made = llama3_scaled(made, config.rope_parameters)
        self.register_buffer("inv_freq", made, persistent=False)

    @torch.no_grad()
    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> Angles:
        """Return [batch, rows, head dim] each, of the type of `like`, for positions [batch, rows]."""
        angles = (positions[..., None].float() * self.inv_freq).repeat(1, 1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def llama3_scaled(made: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Return frequencies scaled as in Llama 3: long waves are stretched, short ones kept, others in between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    waves = 2 * math.pi / made
    stretched = torch.where(waves > original / low, made / rope["factor"], made)
    kept = (original / waves - low) / (high - low)
    between = (1 - kept) * stretched / rope["factor"] + kept * stretched
    outside = (waves < original / high) | (waves > original / low)
    return torch.where(outside, stretched, between)


class DecoderAttention(nn.Module):
    """The attention of one layer.

    Attributes:
        attend: The attention function, with transformers' interface; set by `DecoderModel.attend_by`.
    """

    attend: Callable[..., tuple[torch.Tensor, object]]

    def __init__(self, config: TextSettings, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        width = config.hidden_size
        q_width, kv_width = (
            heads * self.head_dim for heads in (self.num_heads, self.num_key_value_heads)
        )
        self.q_proj = nn.Linear(width, q_width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_width, width, bias=config.out_bias)
        self.q_norm, self.k_norm = (
            RmsNorm(self.head_dim, config.rms_norm_eps) if config.head_norms else nn.Identity()
            for _ in range(2)
        )

    def forward(self, rows: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Return the output of attention for rows [1, rows, hidden]."""
        query, key, value = (
            product(rows).unflatten(-1, (-1, self.head_dim))
            for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (each[:, None] for each in angles)
        query, key = (
            rotated(heads.transpose(1, 2), cos, sin)
            for heads in (self.q_norm(query), self.k_norm(key))
        )
        attended, _ = self.attend(
            self, query, key, value.transpose(1, 2), None, scaling=self.scaling
        )
        added: torch.Tensor = self.o_proj(attended.reshape(*rows.shape[:2], -1))
        return added


class DecoderLayer(nn.Module):
    """One layer."""

    def __init__(self, config: TextSettings, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = DecoderAttention(config, index)
        self.mlp = GatedFeedForward(width, config.intermediate_size, bias=config.feed_forward_bias)
        self.input_layernorm = RmsNorm(width, eps)
        self.post_attention_layernorm = RmsNorm(width, eps)

    def forward(self, rows: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Return rows of the same shape."""
        rows = rows + self.self_attn(self.input_layernorm(rows), angles)
        added: torch.Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return added


class DecoderModel(nn.Module):
    """The model without its head."""

    def __init__(self, config: TextSettings) -> None:
        super().__init__()
        self.config = config
        size = config.vocab_size, config.hidden_size
        # Random values would be overwritten; on the meta device, drawing them would make torch import its compiler.
        self.embed_tokens = nn.Embedding(*size, _weight=torch.empty(size))
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self._axes = "mrope_section" in config.rope_parameters
        self.rotary_emb = AxesRotary(config) if self._axes else TextRotary(config)

    def attend_by(self, attend: Callable[..., tuple[torch.Tensor, object]]) -> None:
        """Set the attention function of all layers."""
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.self_attn.attend = attend

    def forward(
        self, *, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, use_cache: bool
    ) -> SimpleNamespace:
        """Run a packed batch [1, rows, hidden] at positions [1, rows].

        With mrope, they are [4, 1, rows]: the text position and three axes.
        """
        assert not use_cache, "the running step has the cache"
        places = position_ids[-3:] if self._axes else position_ids
        angles = self.rotary_emb(inputs_embeds, places)
        rows = inputs_embeds
        for layer in self.layers:
            rows = layer(rows, angles)
        return SimpleNamespace(last_hidden_state=self.norm(rows))


EPS = 1e-6


class QwenPatchEmbedding(nn.Module):
    """The patch embedding: a convolution whose stride equals its kernel size."""

    def __init__(self, config: QwenVisionSettings) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.shape = (config.in_channels, *kernel)
        self.width = config.hidden_size
        self.proj = nn.Conv3d(
            config.in_channels, self.width, kernel_size=kernel, stride=kernel, bias=False
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Return [patches, hidden] for [patches, values]."""
        rows: torch.Tensor = self.proj(patches.view(-1, *self.shape).to(self.proj.weight.dtype))
        return rows.view(-1, self.width)


class QwenPatchRotary(nn.Module):
    """Cosines and sines of a patch's position in its image."""

    inv_freq: torch.Tensor

    def __init__(self, config: QwenVisionSettings) -> None:
        super().__init__()
        self.config = config
        made = frequencies(config.rope_theta, config.hidden_size // config.num_heads // 2)
        self.register_buffer("inv_freq", made, persistent=False)

    @torch.no_grad()
    def forward(self, places: torch.Tensor) -> Angles:
        """Return float32 [patches, head dim] each, for rows and columns [patches, 2]."""
        angles = (places[..., None].float() * self.inv_freq).flatten(1)
        return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


class QwenPatchAttention(nn.Module):
    """The attention of one block."""

    def __init__(self, config: QwenVisionSettings) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.scaling = (config.hidden_size // config.num_heads) ** -0.5
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, rows: torch.Tensor, cu_seqlens: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Return the output of attention for rows [patches, hidden], within each sequence of `cu_seqlens`."""
        qkv = self.qkv(rows).reshape(len(rows), 3, self.num_heads, -1)
        cos, sin = (each[:, None].float() for each in angles)
        query, key = (
            rotated(each.float(), cos, sin).to(rows.dtype) for each in qkv[:, :2].unbind(1)
        )
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        parts = (
            each.transpose(0, 1)[None].split(lengths, dim=2) for each in (query, key, qkv[:, 2])
        )
        attended = torch.cat(
            [
                functional.scaled_dot_product_attention(
                    queries, keys, values, scale=self.scaling
                ).transpose(1, 2)
                for queries, keys, values in zip(*parts, strict=True)
            ],
            dim=1,
        )
        added: torch.Tensor = self.proj(attended.reshape(len(rows), -1))
        return added


class QwenBlock(nn.Module):
    """One block."""

    def __init__(self, config: QwenVisionSettings) -> None:
        super().__init__()
        self.norm1 = RmsNorm(config.hidden_size, EPS)
        self.norm2 = RmsNorm(config.hidden_size, EPS)
        self.attn = QwenPatchAttention(config)
        self.mlp = GatedFeedForward(config.hidden_size, config.intermediate_size, bias=True)

    def forward(
        self, rows: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: Angles
    ) -> torch.Tensor:
        """Return rows of the same shape."""
        rows = rows + self.attn(self.norm1(rows), cu_seqlens, position_embeddings)
        added: torch.Tensor = rows + self.mlp(self.norm2(rows))
        return added


class QwenMerger(nn.Module):
    """The projector: a square of patches to one row of the language model."""

    def __init__(self, config: QwenVisionSettings) -> None:
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = RmsNorm(config.hidden_size, EPS)
        self.mlp = nn.Sequential(
            nn.Linear(self.width, self.width),
            nn.GELU(),
            nn.Linear(self.width, config.out_hidden_size),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [tokens, out hidden] for [patches, hidden]."""
        merged: torch.Tensor = self.mlp(self.ln_q(rows).view(-1, self.width))
        return merged


class QwenVisionTower(nn.Module):
    """The tower and its projector."""

    def __init__(self, config: QwenVisionSettings) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = QwenPatchEmbedding(config)
        self.rotary_pos_emb = QwenPatchRotary(config)
        self.blocks = nn.ModuleList(QwenBlock(config) for _ in range(config.depth))
        self.merger = QwenMerger(config)

    def forward(self, patches: torch.Tensor, grid_thw: torch.Tensor) -> SimpleNamespace:
        """Run the patches of several images with grids [images, 3]; `pooler_output` is [tokens, out hidden]."""
        config = self.config
        merge = config.spatial_merge_size
        sizes: list[tuple[int, int, int]] = [
            (frames, rows, columns) for frames, rows, columns in grid_thw.tolist()
        ]
        by_windows, counts = window_order(
            sizes, merge, config.window_size // merge // config.patch_size
        )
        order = torch.from_numpy(by_windows)
        unit = merge * merge

        def by_window(values: torch.Tensor) -> torch.Tensor:
            cut: torch.Tensor = values.unflatten(0, (-1, unit))[order].flatten(0, 1)
            return cut

        hidden = by_window(self.patch_embed(patches))
        places = torch.from_numpy(patch_places(sizes, merge))
        cos, sin = self.rotary_pos_emb(places.to(hidden.device))
        angles = by_window(cos), by_window(sin)
        whole, windows = (
            torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
            for lengths in (frame_lengths(sizes), (unit * counts).tolist())
        )
        for index, block in enumerate(self.blocks):
            ends = whole if index in config.fullatt_block_indexes else windows
            hidden = block(hidden, cu_seqlens=ends, position_embeddings=angles)
        merged: torch.Tensor = self.merger(hidden)
        return SimpleNamespace(pooler_output=merged[order.argsort()])
