"""The vision tower of Qwen2.5-VL: patches attend within windows, and in some blocks within their image."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from vsched_workers.families.modules.layers import (
    QwenFeedForward,
    QwenRmsNorm,
    frequencies,
    rotated,
)
from vsched_workers.families.modules.settings import QwenVisionSettings
from vsched_workers.families.qwen_windows import frame_lengths, patch_places, window_order

EPS = 1e-6
Angles = tuple[torch.Tensor, torch.Tensor]


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
        self.norm1 = QwenRmsNorm(config.hidden_size, EPS)
        self.norm2 = QwenRmsNorm(config.hidden_size, EPS)
        self.attn = QwenPatchAttention(config)
        self.mlp = QwenFeedForward(config.hidden_size, config.intermediate_size, bias=True)

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
        self.ln_q = QwenRmsNorm(config.hidden_size, EPS)
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

    def forward(self, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Return [tokens, out hidden] for the patches of several images and their grids [images, 3]."""
        config = self.config
        merge = config.spatial_merge_size
        sizes: list[tuple[int, int, int]] = [
            (frames, rows, columns) for frames, rows, columns in grids.tolist()
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
        return merged[order.argsort()]
