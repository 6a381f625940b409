"""Vision-language models of many architectures, each as small as its features allow, and images for them.

The images are arrays as their processors would make them, with the names of the arguments of `get_image_features`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.parity.architectures import COMMON, DELTA, EXPERTS, LATENT, ROUTED_EXPERTS, SHARED_KV

Arrays = dict[str, npt.NDArray[Any]]

IMAGE, START, END, VIDEO = 5, 6, 7, 8
"""Tokens that the models reserve for parts of an image or a video."""

SIZES = ((4, 8), (8, 4), (6, 4), (4, 4))
"""Heights and widths of the images, in patches."""

Options = dict[str, Any]

_TEXT: Options = {**COMMON, "num_hidden_layers": 3, "max_position_embeddings": 1024}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS: Options = {"sliding_window": 9, "layer_types": _SLIDING}
_LINEAR: Options = {
    **DELTA,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_SMALL: Options = {"hidden_size": 32, "intermediate_size": 48}
_SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 2}
_SQUARE: Options = {**_SMALL, "image_size": 28, "patch_size": 7}
_CLIP: Options = {**_SQUARE, "model_type": "clip_vision_model", "num_hidden_layers": 3}
_CLIP |= {"initializer_range": 0.2}
_SIGLIP: Options = {**_SQUARE, "model_type": "siglip_vision_model", "num_hidden_layers": 3}
_MERGED: Options = {**_SMALL, "patch_size": 14, "spatial_merge_size": 2}
_PIXTRAL: Options = {**_SMALL, "model_type": "pixtral", "image_size": 112, "patch_size": 14}
_PIXTRAL |= {"head_dim": 16}
_QWEN: Options = {"depth": 2, "hidden_size": 32, "embed_dim": 32, "num_heads": 2}
_QWEN |= {"intermediate_size": 48}
_QWEN |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_OUT: Options = {"out_hidden_size": 64}
_AUDIO: Options = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2}
_AUDIO |= {"encoder_ffn_dim": 48, "output_dim": 64, "num_mel_bins": 16}
_VIDEO: Options = {"video_token_id": VIDEO}
_SPAN: Options = {"image_start_token_id": START, "image_end_token_id": END}
_VISION_TOKENS = {**_VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_GLM_TOKENS = {**_VIDEO, **_SPAN, "video_start_token_id": 9, "video_end_token_id": 10}
_MARKED: Options = {"boi_token_index": START, "eoi_token_index": END}
_AUDIO_TOKENS: Options = {"audio_token_id": 9, "audio_start_token_id": 10}
_INDEX: Options = {"image_token_index": IMAGE}
_LAST: Options = {"vision_feature_layer": -1}
_PINPOINTS: Options = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}


def _text(kind: str, **options: Any) -> dict[str, Any]:
    return {"text_config": {"model_type": kind, **_TEXT, **options}}


def _rope(section: tuple[int, ...], **options: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **options}
    return {"rope_parameters": rope}


def _noise(seed: int, *shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _square(side: int = 28, *, lead: tuple[int, ...] = (1,)) -> Callable[[int, int, int], Arrays]:
    """Images of one size, whatever they were."""
    return lambda seed, _h, _w: {"pixel_values": _noise(seed, *lead, 3, side, side)}


def _patches(*shape: int) -> Callable[[int, int, int], Arrays]:
    """Patches one after the other, and their grid."""
    return lambda seed, h, w: {
        "pixel_values": _noise(seed, h * w, *shape),
        "image_grid_thw": np.array([[1, h, w]]),
    }


def _any_size(seed: int, h: int, w: int) -> Arrays:
    """Images of their own size."""
    return {
        "pixel_values": _noise(seed, 1, 3, 14 * h, 14 * w),
        "image_sizes": np.array([[14 * h, 14 * w]]),
    }


def _any_resolution(seed: int, _h: int, _w: int) -> Arrays:
    """A complete image, and the tiles it is cut into."""
    height, width, pieces = ((28, 56, 3), (50, 28, 3), (56, 56, 5))[seed % 3]
    return {
        "pixel_values": _noise(seed, 1, pieces, 3, 28, 28),
        "image_sizes": np.array([[height, width]]),
    }


def _places(seed: int, _h: int, _w: int) -> Arrays:
    """Patches with their places in the image."""
    h, w = 6, 9
    rows, columns = np.mgrid[:h, :w]
    return {
        "pixel_values": np.abs(_noise(seed, 1, h * w, 3 * 16 * 16)),
        "image_position_ids": np.stack([columns, rows], -1).reshape(1, -1, 2),
    }


def _padded(seed: int, h: int, w: int) -> Arrays:
    """Patches one after the other with a mask, and their grid."""
    return {
        "pixel_values": _noise(seed, 1, h * w, 3 * 7 * 7),
        "spatial_shapes": np.array([[h, w]]),
        "pixel_attention_mask": np.ones((1, h * w), np.int64),
    }


@dataclass(frozen=True)
class VisionArchitecture:
    """An architecture: its configuration in addition to the defaults, and the form of its images.

    Attributes:
        image: From a seed, and a height and a width in patches, to the arrays of an image.
        family: The `model_type`, if it is not the name.
    """

    text: Options
    vision: Options
    image: Callable[[int, int, int], Arrays]
    others: Options = field(default_factory=dict)
    family: str = ""

    @property
    def options(self) -> Options:
        return {**self.text, "vision_config": self.vision, **self.others}


_PATCHES = _patches(3 * 14 * 14)
_PAIRS = _patches(3 * 2 * 14 * 14)
_ROPE = _rope((4, 2, 2))
_WHOLE_ROPE = _rope((4, 2, 2), partial_rotary_factor=1.0)
_HALF_ROPE = _rope((2, 1, 1), mrope_interleaved=True, partial_rotary_factor=0.5)
_SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 32}
_GLM = {**_QWEN, **_OUT, "image_size": 112}
_SCALED: Options = {"scale_factor": 2}

VISION_ARCHITECTURES: Mapping[str, VisionArchitecture] = {
    "aria": VisionArchitecture(
        _text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
        {**_SQUARE, "model_type": "idefics3_vision"},
        _square(),
        {**_INDEX, **_LAST, "projector_patch_to_query_dict": {16: 8}},
    ),
    "aya_vision": VisionArchitecture(
        _text("cohere2", **_WINDOWS),
        _SIGLIP,
        _square(),
        {**_INDEX, **_LAST, "downsample_factor": 2, "adapter_layer_norm_eps": 1e-5},
    ),
    "cohere2_vision": VisionArchitecture(
        _text("cohere2", **_WINDOWS),
        _SIGLIP,
        _square(),
        {"downsample_factor": 2, "alignment_intermediate_size": 64},
    ),
    "deepseek_vl": VisionArchitecture(_text("llama"), _SIGLIP, _square()),
    "ernie4_5_vl_moe": VisionArchitecture(
        _text(
            "ernie4_5_vl_moe_text",
            **_rope((2, 2, 4)),
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=[32, 32],
            moe_layer_start_index=1,
            moe_layer_end_index=2,
        ),
        _QWEN,
        _PATCHES,
        {**_SPAN, **_VIDEO},
    ),
    "gemma3": VisionArchitecture(
        _text("gemma3_text", **_WINDOWS, query_pre_attn_scalar=16),
        _SIGLIP,
        _square(),
        # With tied embeddings, which are scaled, it would repeat each token.
        {**_INDEX, **_MARKED, "mm_tokens_per_image": 4, "tie_word_embeddings": False},
    ),
    "gemma4": VisionArchitecture(
        _text(
            "gemma4_text",
            **SHARED_KV
            | {"layer_types": ["sliding_attention", *["full_attention"] * 2]}
            | {"num_kv_shared_layers": 0, "global_head_dim": 32, "num_global_key_value_heads": 1},
        ),
        {**_SMALL, "num_key_value_heads": 2, "head_dim": 16},
        _places,
        {"audio_config": None},
    ),
    "glm4v": VisionArchitecture(_text("glm4v_text", **_WHOLE_ROPE), _GLM, _PAIRS, _GLM_TOKENS),
    "glm4v_moe": VisionArchitecture(
        _text("glm4v_moe_text", **_WHOLE_ROPE, **ROUTED_EXPERTS), _GLM, _PAIRS, _GLM_TOKENS
    ),
    "got_ocr2": VisionArchitecture(
        _text("qwen2"),
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 48}
        | {"image_size": 128, "patch_size": 8, "output_channels": 16}
        | {"window_size": 4, "global_attn_indexes": [1]},
        _square(128),
        _INDEX,
    ),
    "idefics3": VisionArchitecture(_text("llama"), _SQUARE, _square(lead=(1, 3)), _SCALED),
    "internvl": VisionArchitecture(
        _text("qwen2"),
        {**_SMALL, "image_size": [28, 28], "patch_size": [7, 7]},
        _square(lead=(3,)),
        {"downsample_ratio": 0.5},
    ),
    "llava": VisionArchitecture(
        _text("llama"), _CLIP, _square(), {**_INDEX, "vision_feature_layer": -2}
    ),
    "llava (Pixtral)": VisionArchitecture(
        _text("mistral", sliding_window=None),
        _PIXTRAL,
        _any_size,
        {**_INDEX, **_LAST, "vision_feature_select_strategy": "full"},
        family="llava",
    ),
    "llava_next": VisionArchitecture(
        _text("llama"), _CLIP, _any_resolution, {**_INDEX, **_PINPOINTS}
    ),
    "llava_next_video": VisionArchitecture(
        _text("llama"),
        _CLIP,
        _any_resolution,
        {**_INDEX, **_VIDEO, "video_token_index": VIDEO, **_PINPOINTS},
    ),
    "llava_onevision": VisionArchitecture(
        _text("qwen2"), _SIGLIP, _any_resolution, {**_INDEX, **_VIDEO, **_PINPOINTS}
    ),
    "mistral3": VisionArchitecture(
        _text("mistral", sliding_window=None),
        _PIXTRAL,
        _any_size,
        {**_INDEX, **_LAST, "spatial_merge_size": 2},
    ),
    "ovis2": VisionArchitecture(
        _text("qwen2"),
        {**_SQUARE, "hidden_stride": 2, "vocab_size": 64, "num_visual_indicator_tokens": 5},
        _square(),
        {"hidden_size": 64, "visual_indicator_token_ids": [20, 21, 22, 23, 24]},
    ),
    "paddleocr_vl": VisionArchitecture(
        _text("paddleocr_vl_text", **_ROPE),
        {**_MERGED, "image_size": 112},
        _patches(3, 14, 14),
        _VISION_TOKENS,
    ),
    "paligemma": VisionArchitecture(
        _text("gemma"),
        {**_SIGLIP, "projection_dim": 64},
        _square(),
        {**_INDEX, "projection_dim": 64},
    ),
    "qwen2_vl": VisionArchitecture(
        _text("qwen2_vl_text", **_ROPE),
        {**_QWEN, "hidden_size": 64, "mlp_ratio": 2},
        _PAIRS,
        _VISION_TOKENS,
    ),
    "qwen3_5": VisionArchitecture(
        _text("qwen3_5_text", **_HALF_ROPE, **_LINEAR), {**_QWEN, **_OUT}, _PAIRS, _VISION_TOKENS
    ),
    "qwen3_5_moe": VisionArchitecture(
        _text("qwen3_5_moe_text", **_HALF_ROPE, **_LINEAR, **_SHARED_EXPERT),
        {**_QWEN, **_OUT},
        _PAIRS,
        _VISION_TOKENS,
    ),
    "qwen2_5_omni_thinker": VisionArchitecture(
        _text("qwen2_5_omni_text", **_ROPE),
        {**_QWEN, **_OUT, "fullatt_block_indexes": [1], "window_size": 56},
        _PAIRS,
        {**_INDEX, **_VISION_TOKENS, **_AUDIO_TOKENS, "audio_config": _AUDIO}
        | {"video_token_index": VIDEO, "audio_token_index": 9, "audio_end_token_id": 11},
    ),
    "qwen3_omni_moe_thinker": VisionArchitecture(
        _text("qwen3_omni_moe_text", **_rope((4, 2, 2), mrope_interleaved=True), **EXPERTS),
        {**_QWEN, **_OUT, "deepstack_visual_indexes": [0, 1]},
        _PAIRS,
        {**_VISION_TOKENS, **_AUDIO_TOKENS}
        | {"audio_config": {**_AUDIO, "downsample_hidden_size": 16}},
    ),
    "kimi_k25": VisionArchitecture(
        _text("deepseek_v3", **LATENT, q_lora_rank=24, **ROUTED_EXPERTS),
        {**_SMALL, "patch_size": 14, "merge_kernel_size": [2, 2]}
        | {"pos_emb_height": 6, "pos_emb_width": 6},
        _patches(3, 14, 14),
        {**_VISION_TOKENS, "projection_hidden_size": 32},
    ),
    "lfm2_vl": VisionArchitecture(
        _text("lfm2", layer_types=["conv", "full_attention", "conv"], block_multiple_of=16),
        {**_SMALL, "model_type": "siglip2_vision_model", "patch_size": 7, "num_patches": 64},
        _padded,
        {"downsample_factor": 2, "projector_hidden_size": 64},
    ),
    "hunyuan_vl": VisionArchitecture(
        _text("hunyuan_vl_text", **_rope((2, 3, 3))), {**_MERGED, **_OUT}, _PATCHES, _SPAN
    ),
    "smolvlm": VisionArchitecture(_text("llama"), _SQUARE, _square(lead=(1, 3)), _SCALED),
}


VISION_SAMPLE = ("ernie4_5_vl_moe", "gemma3", "llava", "qwen2_vl")
"""Experts for images alone, bidirectional images, rows in a list, positions of three axes."""

VISION_REFUSED = ("ovis2",)
"""Architectures of these that are refused."""


def images_of(name: str) -> list[Arrays]:
    """Return the arrays of some images."""
    make = VISION_ARCHITECTURES[name].image
    return [make(seed, *size) for seed, size in enumerate(SIZES)]


def config_of(
    name: str, *, image_token_id: int = IMAGE, vocab_size: int = 300, **options: Any
) -> Any:
    """Return the configuration of a model of transformers."""
    architecture = VISION_ARCHITECTURES[name]
    chosen = {**architecture.options, **options, "image_token_id": image_token_id}
    if "image_token_index" in chosen:
        chosen["image_token_index"] = image_token_id
    chosen["text_config"] = {**chosen["text_config"], "vocab_size": vocab_size}
    return CONFIG_MAPPING[architecture.family or name](**chosen)


def make_model(name: str, **options: Any) -> Any:
    """Return a model of random float32 weights, in which every parameter has an influence."""
    config = config_of(name, **options)
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() <= 1:
                weight.add_(torch.randn(weight.shape, generator=noise) * 0.1)
            elif weight.std() < 0.03:
                scale = 2 / math.sqrt(math.prod(weight.shape[1:]))
                weight.copy_(torch.randn(weight.shape, generator=noise) * min(0.2, scale))
    return model


def save_model(name: str, directory: Path) -> None:
    """Write such a model as a checkpoint without a tokenizer."""
    make_model(name).save_pretrained(directory)
