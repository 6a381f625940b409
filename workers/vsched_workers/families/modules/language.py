"""The language model of Qwen2.5-VL over a packed batch, with paged attention."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn

from vsched_workers.families.modules.layers import (
    QwenFeedForward,
    QwenRmsNorm,
    frequencies,
    rotated,
)
from vsched_workers.families.modules.settings import QwenTextSettings

Angles = tuple[torch.Tensor, torch.Tensor]


class QwenAxesRotary(nn.Module):
    """Cosines and sines of mrope positions: each axis has sections of the frequencies."""

    inv_freq: torch.Tensor
    rope_type = "default"
    attention_scaling = 1.0

    def __init__(self, config: QwenTextSettings) -> None:
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


class QwenAttention(nn.Module):
    """The attention of one layer.

    Attributes:
        attend: The attention function, with transformers' interface; set by `QwenLanguageModel.attend_by`.
    """

    attend: Callable[..., tuple[torch.Tensor, object]]

    def __init__(self, config: QwenTextSettings, index: int) -> None:
        super().__init__()
        self.layer_idx = index
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        width, kv_width = config.hidden_size, self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv_width)
        self.v_proj = nn.Linear(width, kv_width)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, rows: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Return the output of attention for rows [1, rows, hidden]."""
        query, key, value = (
            product(rows).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (each[:, None] for each in angles)
        turned = rotated(query, cos, sin), rotated(key, cos, sin)
        attended, _ = self.attend(self, *turned, value, None, scaling=self.scaling)
        added: torch.Tensor = self.o_proj(attended.reshape(*rows.shape[:2], -1))
        return added


class QwenLayer(nn.Module):
    """One layer."""

    def __init__(self, config: QwenTextSettings, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = QwenAttention(config, index)
        self.mlp = QwenFeedForward(width, config.intermediate_size, bias=False)
        self.input_layernorm = QwenRmsNorm(width, eps)
        self.post_attention_layernorm = QwenRmsNorm(width, eps)

    def forward(self, rows: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Return rows of the same shape."""
        rows = rows + self.self_attn(self.input_layernorm(rows), angles)
        added: torch.Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return added


class QwenLanguageModel(nn.Module):
    """The model without its head."""

    def __init__(self, config: QwenTextSettings) -> None:
        super().__init__()
        self.config = config
        size = config.vocab_size, config.hidden_size
        # Random values would be overwritten; on the meta device, drawing them would make torch import its compiler.
        self.embed_tokens = nn.Embedding(*size, _weight=torch.empty(size))
        self.layers = nn.ModuleList(
            QwenLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = QwenRmsNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = QwenAxesRotary(config)

    def attend_by(self, attend: Callable[..., tuple[torch.Tensor, object]]) -> None:
        """Set the attention function of all layers."""
        for layer in self.layers:
            assert isinstance(layer, QwenLayer)
            layer.self_attn.attend = attend

    def forward(
        self, *, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, use_cache: bool
    ) -> SimpleNamespace:
        """Run a packed batch [1, rows, hidden] at positions [4, 1, rows]: the text position and three mrope axes."""
        assert not use_cache, "the running step has the cache"
        angles = self.rotary_emb(inputs_embeds, position_ids[-3:])
        rows = inputs_embeds
        for layer in self.layers:
            rows = layer(rows, angles)
        return SimpleNamespace(last_hidden_state=self.norm(rows))
