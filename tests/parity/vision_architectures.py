"""Vision-language models of many architectures, each as small as its features allow, and images for them.

The images are arrays as their processors would make them, with the names of the arguments of `get_image_features`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.parity.architectures import EXPERTS, LATENT, ROUTED_EXPERTS

Arrays = dict[str, npt.NDArray[Any]]

IMAGE, START, END, VIDEO = 5, 6, 7, 8
"""Tokens that the models reserve for parts of an image or a video."""

SIZES = ((4, 8), (8, 4), (6, 4), (4, 4))
"""Heights and widths of the images, in patches."""

_TEXT: Mapping[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.35,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {**LATENT, "q_lora_rank": 24}
_WINDOWS = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_SQUARE = {**_SMALL, "image_size": 28, "patch_size": 7}
_CLIP = {
    **_SQUARE,
    "model_type": "clip_vision_model",
    "num_hidden_layers": 3,
    "initializer_range": 0.2,
}
_SIGLIP = {**_SQUARE, "model_type": "siglip_vision_model", "num_hidden_layers": 3}
_PIXTRAL = {
    **_SMALL,
    "model_type": "pixtral",
    "image_size": 112,
    "patch_size": 14,
    "head_dim": 16,
}
_QWEN = {
    "depth": 2,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_OUT = {"out_hidden_size": 64}
_DEEPSTACK = {**_QWEN, **_OUT, "deepstack_visual_indexes": [0, 1]}
_GLM = {**_QWEN, **_OUT, "image_size": 112}
_VISION_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_GLM_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": 9,
    "video_end_token_id": 10,
}
_INDEX = {"image_token_index": IMAGE, "image_token_id": IMAGE}
_PINPOINTS = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}


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

    options: Mapping[str, Any]
    image: Callable[[int, int, int], Arrays]
    family: str = ""


VISION_ARCHITECTURES: Mapping[str, VisionArchitecture] = {
    "aria": VisionArchitecture(
        {
            **_text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
            **_INDEX,
            "vision_config": {**_SQUARE, "model_type": "idefics3_vision"},
            "projector_patch_to_query_dict": {16: 8},
            "vision_feature_layer": -1,
        },
        _square(),
    ),
    "aya_vision": VisionArchitecture(
        {
            **_text("cohere2", **_WINDOWS),
            **_INDEX,
            "vision_config": _SIGLIP,
            "vision_feature_layer": -1,
            "downsample_factor": 2,
            "adapter_layer_norm_eps": 1e-5,
        },
        _square(),
    ),
    "cohere2_vision": VisionArchitecture(
        {
            **_text("cohere2", **_WINDOWS),
            "vision_config": _SIGLIP,
            "image_token_id": IMAGE,
            "downsample_factor": 2,
            "alignment_intermediate_size": 64,
        },
        _square(),
    ),
    "deepseek_vl": VisionArchitecture(
        {**_text("llama"), "vision_config": _SIGLIP, "image_token_id": IMAGE}, _square()
    ),
    "ernie4_5_vl_moe": VisionArchitecture(
        {
            **_text(
                "ernie4_5_vl_moe_text",
                **_rope((2, 2, 4)),
                moe_num_experts=4,
                moe_k=2,
                moe_intermediate_size=[32, 32],
                moe_layer_start_index=1,
                moe_layer_end_index=2,
            ),
            "vision_config": _QWEN,
            "image_start_token_id": START,
            "image_end_token_id": END,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
        _patches(3 * 14 * 14),
    ),
    "gemma3": VisionArchitecture(
        {
            **_text("gemma3_text", **_WINDOWS, query_pre_attn_scalar=16),
            **_INDEX,
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "boi_token_index": START,
            "eoi_token_index": END,
            "tie_word_embeddings": False,  # if tied, its scaled embeddings make it repeat each token
        },
        _square(),
    ),
    "gemma4": VisionArchitecture(
        {
            **_text(
                "gemma4_text",
                sliding_window=9,
                layer_types=["sliding_attention", "full_attention", "full_attention"],
                hidden_size_per_layer_input=16,
                vocab_size_per_layer_input=300,
                num_kv_shared_layers=0,
                global_head_dim=32,
                num_global_key_value_heads=1,
            ),
            "vision_config": {**_SMALL, "num_key_value_heads": 2, "head_dim": 16},
            "audio_config": None,
            "image_token_id": IMAGE,
        },
        _places,
    ),
    "glm4v": VisionArchitecture(
        {
            **_text("glm4v_text", **_rope((4, 2, 2), partial_rotary_factor=1.0)),
            "vision_config": _GLM,
            **_GLM_TOKENS,
        },
        _patches(3 * 2 * 14 * 14),
    ),
    "glm4v_moe": VisionArchitecture(
        {
            **_text(
                "glm4v_moe_text", **_rope((4, 2, 2), partial_rotary_factor=1.0), **ROUTED_EXPERTS
            ),
            "vision_config": _GLM,
            **_GLM_TOKENS,
        },
        _patches(3 * 2 * 14 * 14),
    ),
    "got_ocr2": VisionArchitecture(
        {
            **_text("qwen2"),
            **_INDEX,
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 128,
                "patch_size": 8,
                "output_channels": 16,
                "mlp_dim": 48,
                "window_size": 4,
                "global_attn_indexes": [1],
            },
        },
        _square(128),
    ),
    "idefics3": VisionArchitecture(
        {
            **_text("llama"),
            "vision_config": _SQUARE,
            "scale_factor": 2,
            "image_token_id": IMAGE,
        },
        _square(lead=(1, 3)),
    ),
    "internvl": VisionArchitecture(
        {
            **_text("qwen2"),
            "vision_config": {**_SMALL, "image_size": [28, 28], "patch_size": [7, 7]},
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
        },
        _square(lead=(3,)),
    ),
    "llava": VisionArchitecture(
        {**_text("llama"), **_INDEX, "vision_config": _CLIP, "vision_feature_layer": -2},
        _square(),
    ),
    "llava (Pixtral)": VisionArchitecture(
        {
            **_text("mistral", sliding_window=None),
            **_INDEX,
            "vision_config": _PIXTRAL,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        _any_size,
        family="llava",
    ),
    "llava_next": VisionArchitecture(
        {**_text("llama"), **_INDEX, "vision_config": _CLIP, **_PINPOINTS}, _any_resolution
    ),
    "llava_next_video": VisionArchitecture(
        {
            **_text("llama"),
            **_INDEX,
            "vision_config": _CLIP,
            "video_token_id": VIDEO,
            "video_token_index": VIDEO,
            **_PINPOINTS,
        },
        _any_resolution,
    ),
    "llava_onevision": VisionArchitecture(
        {
            **_text("qwen2"),
            **_INDEX,
            "vision_config": _SIGLIP,
            "video_token_id": VIDEO,
            **_PINPOINTS,
        },
        _any_resolution,
    ),
    "mistral3": VisionArchitecture(
        {
            **_text("mistral", sliding_window=None),
            **_INDEX,
            "vision_config": _PIXTRAL,
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
        },
        _any_size,
    ),
    "ovis2": VisionArchitecture(
        {
            **_text("qwen2"),
            "vision_config": {
                **_SQUARE,
                "hidden_stride": 2,
                "vocab_size": 64,
                "num_visual_indicator_tokens": 5,
            },
            "image_token_id": IMAGE,
            "hidden_size": 64,
            "visual_indicator_token_ids": [20, 21, 22, 23, 24],
        },
        _square(),
    ),
    "paddleocr_vl": VisionArchitecture(
        {
            **_text("paddleocr_vl_text", **_rope((4, 2, 2))),
            "vision_config": {
                **_SMALL,
                "image_size": 112,
                "patch_size": 14,
                "spatial_merge_size": 2,
            },
            **_VISION_TOKENS,
        },
        _patches(3, 14, 14),
    ),
    "paligemma": VisionArchitecture(
        {
            **_text("gemma"),
            **_INDEX,
            "vision_config": {**_SIGLIP, "projection_dim": 64},
            "projection_dim": 64,
        },
        _square(),
    ),
    "qwen2_vl": VisionArchitecture(
        {
            **_text("qwen2_vl_text", **_rope((4, 2, 2))),
            "vision_config": {**_QWEN, "hidden_size": 64, "mlp_ratio": 2},
            **_VISION_TOKENS,
        },
        _patches(3 * 2 * 14 * 14),
    ),
    "qwen3_5": VisionArchitecture(
        {
            **_text(
                "qwen3_5_text",
                **_rope((2, 1, 1), mrope_interleaved=True, partial_rotary_factor=0.5),
                **_LINEAR,
            ),
            "vision_config": {**_QWEN, **_OUT},
            **_VISION_TOKENS,
        },
        _patches(3 * 2 * 14 * 14),
    ),
    "qwen3_5_moe": VisionArchitecture(
        {
            **_text(
                "qwen3_5_moe_text",
                **_rope((2, 1, 1), mrope_interleaved=True, partial_rotary_factor=0.5),
                **_LINEAR,
                **EXPERTS,
                shared_expert_intermediate_size=32,
            ),
            "vision_config": {**_QWEN, **_OUT},
            **_VISION_TOKENS,
        },
        _patches(3 * 2 * 14 * 14),
    ),
    "qwen2_5_omni_thinker": VisionArchitecture(
        {
            **_text("qwen2_5_omni_text", **_rope((4, 2, 2))),
            "vision_config": {**_QWEN, **_OUT, "fullatt_block_indexes": [1], "window_size": 56},
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "output_dim": 64,
                "num_mel_bins": 16,
            },
            **_INDEX,
            **_VISION_TOKENS,
            "video_token_index": VIDEO,
            "audio_token_index": 9,
            "audio_token_id": 9,
            "audio_start_token_id": 10,
            "audio_end_token_id": 11,
        },
        _patches(3 * 2 * 14 * 14),
    ),
    "qwen3_omni_moe_thinker": VisionArchitecture(
        {
            **_text("qwen3_omni_moe_text", **_rope((4, 2, 2), mrope_interleaved=True), **EXPERTS),
            "vision_config": _DEEPSTACK,
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "output_dim": 64,
                "num_mel_bins": 16,
                "downsample_hidden_size": 16,
            },
            **_VISION_TOKENS,
            "audio_token_id": 9,
            "audio_start_token_id": 10,
        },
        _patches(3 * 2 * 14 * 14),
    ),
    "kimi_k25": VisionArchitecture(
        {
            **_text("deepseek_v3", **_LATENT, **ROUTED_EXPERTS),
            "vision_config": {
                **_SMALL,
                "patch_size": 14,
                "pos_emb_height": 6,
                "pos_emb_width": 6,
                "merge_kernel_size": [2, 2],
            },
            "projection_hidden_size": 32,
            **_VISION_TOKENS,
        },
        _patches(3, 14, 14),
    ),
    "lfm2_vl": VisionArchitecture(
        {
            **_text("lfm2", layer_types=["conv", "full_attention", "conv"], block_multiple_of=16),
            "vision_config": {
                **_SMALL,
                "model_type": "siglip2_vision_model",
                "patch_size": 7,
                "num_patches": 64,
            },
            "image_token_id": IMAGE,
            "downsample_factor": 2,
            "projector_hidden_size": 64,
        },
        _padded,
    ),
    "hunyuan_vl": VisionArchitecture(
        {
            **_text("hunyuan_vl_text", **_rope((2, 3, 3))),
            "vision_config": {**_SMALL, **_OUT, "patch_size": 14, "spatial_merge_size": 2},
            "image_token_id": IMAGE,
            "image_start_token_id": START,
            "image_end_token_id": END,
        },
        _patches(3 * 14 * 14),
    ),
    "smolvlm": VisionArchitecture(
        {
            **_text("llama"),
            "vision_config": _SQUARE,
            "scale_factor": 2,
            "image_token_id": IMAGE,
        },
        _square(lead=(1, 3)),
    ),
}


VISION_SAMPLE = ("ernie4_5_vl_moe", "gemma3", "llava", "qwen2_vl")
"""Experts for images alone, bidirectional images, rows in a list, positions of three axes."""

VISION_REFUSED = ("ovis2",)
"""Architectures of these that are refused."""


def images_of(name: str) -> list[Arrays]:
    """Return the arrays of some images."""
    make = VISION_ARCHITECTURES[name].image
    return [make(seed, *size) for seed, size in enumerate(SIZES)]


def make_model(
    name: str, *, image_token_id: int = IMAGE, vocab_size: int = 300, **options: Any
) -> Any:
    """Return a model of random float32 weights, in which every parameter has an influence."""
    architecture = VISION_ARCHITECTURES[name]
    chosen = {**architecture.options, **options, "image_token_id": image_token_id}
    if "image_token_index" in chosen:
        chosen["image_token_index"] = image_token_id
    chosen["text_config"] = {**chosen["text_config"], "vocab_size": vocab_size}
    config = CONFIG_MAPPING[architecture.family or name](**chosen)
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
