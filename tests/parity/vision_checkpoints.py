"""Complete checkpoints of vision-language models: weights, tokenizer, processor and chat template, all tiny."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.parity.architectures import byte_tokenizer
from tests.parity.vision_architectures import VISION_ARCHITECTURES, config_of, make_model

PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARKER\n{% elif part['type'] == 'video' %}VIDEO\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_NO_TENSORS = b"\x02" + bytes(7) + b"{}"


@dataclass(frozen=True)
class Processing:
    """The parts of a checkpoint for images.

    Attributes:
        marker: The text of an image in a prompt; `placeholder` is the token of each row, if it is another.
        tokens: Special tokens, by their names in the tokenizer.
        processor: Content of `processor_config.json`; `images` is that of `preprocessor_config.json`.
        torchvision: Whether transformers has its image processor for torchvision alone.
        video: The text of a video in a prompt; `videos` is the content of `video_preprocessor_config.json`.
    """

    marker: str
    tokens: Mapping[str, str]
    processor: Mapping[str, Any]
    images: Mapping[str, Any]
    placeholder: str = ""
    template: str = PARTS_TEMPLATE
    options: Mapping[str, Any] = field(default_factory=dict)
    torchvision: bool = False
    video: str = ""
    videos: Mapping[str, Any] = field(default_factory=dict)


_IMAGE = {"image_token": "<image>"}
_VIDEO = {**_IMAGE, "video_token": "<video>"}
_CLIP_SIZE = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_SIDE = {"size": {"height": 28, "width": 28}}
_GRID = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_AREA = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 112}}
_VOLUME = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 112 * 10}}
_GLM_TOKENS = {"image_token": "<|image|>", "video_token": "<|video|>"}
_GLM_TOKENS |= {"start": "<|begin_of_image|>", "end": "<|end_of_image|>"}
_GLM_TOKENS |= {"video_start": "<|begin_of_video|>", "video_end": "<|end_of_video|>"}
_QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN_TOKENS |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
_PLACES = [(row, column) for row in range(1, 7) for column in range(1, 7)]
_CELLS = {f"cell_{row}_{column}": f"<row_{row}_col_{column}>" for row, column in _PLACES}
_TILES = {
    f"tile_{row}_{at}": f"<|img_row_{row}_col_{at}|>" for row, at in _PLACES if max(row, at) < 5
}
_IDEFICS = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
_FULL = {"vision_feature_select_strategy": "full"}
_WITHOUT_CLASS: Mapping[str, Any] = {"patch_size": 7, "num_additional_image_tokens": 1} | {
    "vision_feature_select_strategy": "default"
}
_CELL_TOKENS = {
    **_IMAGE,
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    **_CELLS,
}
_PINPOINTS = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}

PROCESSING: Mapping[str, Processing] = {
    "cohere2_vision": Processing(
        "<|IMG_PATCH|>",
        {"image_token": "<|IMG_PATCH|>", "img_line_break_token": "<|IMG_LINE_BREAK|>"}
        | {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"},
        {"processor_class": "Cohere2VisionProcessor"},
        {"image_processor_type": "Cohere2VisionImageProcessorFast", **_SIDE}
        | {"max_patches": 4, "patch_size": 2},
        torchvision=True,
    ),
    "gemma3": Processing(
        "<start_of_image>",
        {"image_token": "<image_soft_token>"}
        | {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        {"image_processor_type": "Gemma3ImageProcessor", **_SIDE},
        placeholder="<image_soft_token>",
    ),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe"),
        Processing(
            "<|image|>",
            _GLM_TOKENS,
            {"processor_class": "Glm4vProcessor"},
            {"image_processor_type": "Glm4vImageProcessor", **_GRID, **_AREA},
            video="<|begin_of_video|><|video|><|end_of_video|>",
            videos={"video_processor_type": "Glm4vVideoProcessor", **_GRID, **_VOLUME},
        ),
    ),
    "idefics3": Processing(
        "<image>",
        _CELL_TOKENS,
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        {"image_processor_type": "Idefics3ImageProcessorFast", **_IDEFICS},
    ),
    "internvl": Processing(
        "<IMG_CONTEXT>",
        {"start_image_token": "<img>", "end_image_token": "</img>"}
        | {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"image_processor_type": "GotOcr2ImageProcessorFast", **_SIDE, "max_patches": 6},
        video="<video>",
        videos={"video_processor_type": "InternVLVideoProcessor", **_SIDE},
    ),
    "lfm2_vl": Processing(
        "<image>",
        {**_IMAGE, "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
        | {"image_thumbnail": "<|img_thumbnail|>", **_TILES},
        {"processor_class": "Lfm2VlProcessor"},
        {"image_processor_type": "Lfm2VlImageProcessorFast", "tile_size": 56}
        | {"encoder_patch_size": 7, "downsample_factor": 2, "max_num_patches": 64}
        | {"min_tiles": 2, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 16},
        torchvision=True,
    ),
    "llava": Processing(
        "<image>",
        _IMAGE,
        {"processor_class": "LlavaProcessor", **_WITHOUT_CLASS},
        {"image_processor_type": "CLIPImageProcessor", **_CLIP_SIZE},
    ),
    "llava_next_video": Processing(
        "<image>",
        _VIDEO,
        {"processor_class": "LlavaNextVideoProcessor", **_WITHOUT_CLASS},
        {"image_processor_type": "LlavaNextImageProcessor", **_CLIP_SIZE, **_PINPOINTS},
        video="<video>",
        videos={"video_processor_type": "LlavaNextVideoVideoProcessor", **_CLIP_SIZE},
    ),
    "llava_onevision": Processing(
        "<image>",
        _VIDEO,
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, **_FULL},
        {"image_processor_type": "LlavaOnevisionImageProcessor", **_SIDE, **_PINPOINTS},
        options=_FULL,
        video="<video>",
        videos={"video_processor_type": "LlavaOnevisionVideoProcessor", **_SIDE},
    ),
    "mistral3": Processing(
        "[IMG]",
        {
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
        {"image_processor_type": "PixtralImageProcessorFast", "patch_size": 14}
        | {"size": {"longest_edge": 112}},
    ),
    "paligemma": Processing(
        "<image>",
        _IMAGE,
        {"processor_class": "PaliGemmaProcessor"},
        {"image_processor_type": "SiglipImageProcessor", **_SIDE, "image_seq_length": 16},
        template=TEXT_TEMPLATE,
    ),
    "qwen2_vl": Processing(
        "<|image_pad|>",
        _QWEN_TOKENS,
        {"processor_class": "Qwen2VLProcessor"},
        {"image_processor_type": "Qwen2VLImageProcessor", **_GRID, **_AREA},
        video="<|vision_start|><|video_pad|><|vision_end|>",
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        Processing(
            "<|image_pad|>",
            _QWEN_TOKENS,
            {"processor_class": "Qwen3VLProcessor"},
            {"image_processor_type": "Qwen2VLImageProcessor", **_GRID, **_AREA},
            video="<|vision_start|><|video_pad|><|vision_end|>",
            videos={"video_processor_type": "Qwen3VLVideoProcessor", **_GRID, **_VOLUME},
        ),
    ),
    "smolvlm": Processing(
        "<image>",
        _CELL_TOKENS,
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        {"image_processor_type": "SmolVLMImageProcessor", **_IDEFICS},
        video="<video>",
        videos={"video_processor_type": "SmolVLMVideoProcessor", **_IDEFICS, "fps": 1},
    ),
}

WITH_VIDEO = tuple(sorted(name for name, each in PROCESSING.items() if each.video))
ON_PILLOW = tuple(sorted(name for name, each in PROCESSING.items() if not each.torchvision))


def make_vision_checkpoint(name: str, directory: Path, *, weights: bool = True) -> None:
    """Write a checkpoint of random float32 weights that takes images, or everything but the weights."""
    processing = PROCESSING[name]
    tokenizer = _tokenizer(processing)
    image = tokenizer.convert_tokens_to_ids(processing.placeholder or processing.marker)
    options: dict[str, Any] = {**processing.options}
    if "video_token_id" in VISION_ARCHITECTURES[name].options:
        options["video_token_id"] = tokenizer.convert_tokens_to_ids(
            processing.tokens["video_token"]
        )
    options |= {"image_token_id": image, "vocab_size": len(tokenizer)}
    if weights:
        make_model(name, **options).save_pretrained(directory)
    else:
        config_of(name, **options).save_pretrained(directory)
        (directory / "model.safetensors").write_bytes(_NO_TENSORS)
    tokenizer.save_pretrained(directory)
    for file, content in (
        ("processor_config.json", processing.processor),
        ("preprocessor_config.json", processing.images),
        ("video_preprocessor_config.json", processing.videos),
    ):
        if not content:
            continue
        (directory / file).write_text(json.dumps(content))


def _tokenizer(processing: Processing) -> Any:
    template = processing.template.replace("MARKER", processing.marker)
    template = template.replace("VIDEO", processing.video)
    # Adjacent line breaks are tokenized together, as with the tokenizers of large models.
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]
    return byte_tokenizer(template, merges=merges, special=processing.tokens)
