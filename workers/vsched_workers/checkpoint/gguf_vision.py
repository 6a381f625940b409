"""Vision towers of Qwen2.5-VL and Qwen3-VL in separate GGUF files (`mmproj`). Transformers cannot read them.

Names and shapes of tensors are those of llama.cpp's converter: it splits the patch embedding by frame and, for
Qwen2.5-VL, the query, key and value projection. Attention window, image sizes and video positions are constants here,
because GGUF files lack them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vsched.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_TOWER = "model.visual."
_WINDOW_PATCHES = 8
_TOKENS_PER_SECOND = 2
_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_MERGER = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
_LEVEL = {"linear_fc1": "fc1", "linear_fc2": "fc2", "norm": "norm"}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A family of vision-language models.

    Attributes:
        text: The architecture, for transformers, of its language model alone.
        model_type: Its type in transformers.
        projector: The type of its tower in GGUF.
        pixels: Minimum and maximum pixels of an image.
    """

    text: str
    model_type: str
    projector: str
    pixels: tuple[int, int]


KINDS = {
    "qwen2vl": _Kind("qwen2", "qwen2_5_vl", "qwen2.5vl_merger", (56 * 56, 3584 * 3584)),
    "qwen3vl": _Kind("qwen3", "qwen3_vl", "qwen3vl_merger", (256 * 256, 4096 * 4096)),
}
"""By the architecture in the file of the language model."""


@dataclass(frozen=True, slots=True)
class Vision:
    """The vision part of a checkpoint, to be added to its language model.

    Attributes:
        config: The configuration of the whole model.
        weights: The tower, by names in the checkpoint.
        processor: The settings of its image processor.
    """

    config: Any
    weights: Mapping[str, torch.Tensor]
    processor: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Write the settings to the folder of a checkpoint."""
        self.config.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(self.processor, indent=2))


def present_as_text_model(reader: Any, architecture: str) -> None:
    """Rename the vision-language architecture in a reader to the text architecture that transformers supports."""
    text, field = KINDS[architecture].text, reader.get_field("general.architecture")
    field.parts[field.data[0]] = np.frombuffer(text.encode(), np.uint8)
    renamed = {
        key.replace(f"{architecture}.", f"{text}."): each for key, each in reader.fields.items()
    }
    reader.fields.clear()
    reader.fields.update(renamed)


def fits(tower: Any, architecture: str, width: int) -> bool:
    """Whether a tower belongs to a language model of this architecture and hidden size."""
    found = _value(tower, "clip.projector_type"), _value(tower, "clip.vision.projection_dim")
    return architecture in KINDS and found == (KINDS[architecture].projector, width)


def read_vision(
    tower: Any, architecture: str, reader: Any, language: Any, vocabulary: Any
) -> Vision:
    """Read the tower of a language model: its configuration in transformers, and its tokens by their texts.

    `tower` and `reader` are the readers of both files.

    Raises:
        CheckpointError: When a setting or a tensor is missing.
    """
    import torch
    import transformers
    from gguf import MODEL_ARCH, get_tensor_name_map

    kind = KINDS[architecture]
    missing = [token for token in _TOKENS.values() if token not in vocabulary]
    if missing:
        raise CheckpointError(
            f"the vocabulary has no {missing[0]}. Remedy: get the model as safetensors."
        )
    tensors = {each.name: each for each in tower.tensors}
    absent = {"model_type", "architectures", "_name_or_path", "_model_name_or_path"}
    text = {key: each for key, each in language.to_dict().items() if key not in absent}
    sections = _value(reader, f"{kind.text}.rope.dimension_sections")
    interleaved = {"mrope_interleaved": True} if kind.model_type == "qwen3_vl" else {}
    text["rope_parameters"] |= {"mrope_section": sections[:3], **interleaved}
    library: Any = transformers
    config = library.AutoConfig.for_model(
        kind.model_type,
        text_config=text,
        vision_config=_vision_settings(kind, tower, tensors),
        tie_word_embeddings=language.tie_word_embeddings,
        dtype=language.dtype,
        **{name: vocabulary[token] for name, token in _TOKENS.items()},
    )
    with torch.device("meta"):
        whole = library.AutoModelForImageTextToText.from_config(config)
    config.architectures = [type(whole).__name__]
    vision = config.vision_config
    levels = getattr(vision, "deepstack_visual_indexes", ())
    # The layers of the merger are numbered up to 2 like blocks, of which there may be fewer.
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, max(vision.depth, 3))
    read = _Tensors(tensors, levels, names).read
    weights = {
        name: torch.tensor(read(name.removeprefix(_TOWER))).view(each.shape).to(language.dtype)
        for name, each in whole.state_dict().items()
        if name.startswith(_TOWER)
    }
    return Vision(config, weights, _processor(kind, tower, vision))


def whole_name(name: str) -> str:
    """Return a language model weight's name in the vision-language checkpoint."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _value(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise CheckpointError(
            f"the file of a vision-language model lacks {name}. Remedy: get one that llama.cpp has converted, or the "
            "model as safetensors."
        )
    return field.contents()


def _vision_settings(kind: _Kind, tower: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a tower, as far as it differs from transformers' defaults."""
    names = {
        "depth": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_heads": "attention.head_count",
        "patch_size": "patch_size",
        "out_hidden_size": "projection_dim",
    }
    made = {name: _value(tower, f"clip.vision.{key}") for name, key in names.items()}
    if kind.model_type == "qwen2_5_vl":
        every = _value(tower, "clip.vision.n_wa_pattern")
        full = [*range(every - 1, made["depth"], every)]
        window = _WINDOW_PATCHES * made["patch_size"]
        made |= {"fullatt_block_indexes": full, "window_size": window}
        return made | {"tokens_per_second": _TOKENS_PER_SECOND}
    flags = _value(tower, "clip.vision.is_deepstack_layers")
    return made | {
        "spatial_merge_size": _value(tower, "clip.vision.spatial_merge_size"),
        "num_position_embeddings": len(tensors["v.position_embd.weight"].data),
        "deepstack_visual_indexes": [index for index, flag in enumerate(flags) if flag],
    }


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of a tower by their names in transformers.

    Attributes:
        given: Tensors of the file by their names in it.
        levels: Layers whose output is merged, too.
        names: The map of layers' names.
    """

    given: Mapping[str, Any]
    levels: Sequence[int]
    names: Any

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor of the tower; split tensors are joined, others keep the file's shape."""
        layer, _, end = name.rpartition(".")
        first, *rest = layer.split(".")
        if first == "merger" and rest[0] in _MERGER:
            return self._read(f"{_MERGER[rest[0]]}.{end}")
        if first == "deepstack_merger_list":
            return self._read(f"v.deepstack.{self.levels[int(rest[0])]}.{_LEVEL[rest[1]]}.{end}")
        found = f"{self.names.get_name(f'visual.{layer}')}.{end}"
        if name == "patch_embed.proj.weight":
            return np.stack([self._read(each) for each in (found, f"{found}.1")], 2)
        if layer.endswith(".qkv") and found not in self.given:
            return np.concatenate([self._read(found.replace("_qkv", f"_{part}")) for part in "qkv"])
        return self._read(found)

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        from gguf import dequantize

        if name not in self.given:
            raise CheckpointError(
                f"the file of the vision tower lacks {name}. Remedy: get the whole file, or the model as safetensors."
            )
        return dequantize(self.given[name].data, self.given[name].tensor_type)


def _processor(kind: _Kind, tower: Any, vision: Any) -> dict[str, Any]:
    least, most = kind.pixels
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": _value(tower, "clip.vision.image_mean"),
        "image_std": _value(tower, "clip.vision.image_std"),
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "size": {"shortest_edge": least, "longest_edge": most},
    }
