"""Any other model in transformers: its properties, read from its configuration without torch.

Such a model runs as transformers' own modules, with the attention of `batching/paged_attention.py`. Unsupported models
are refused, here based on the configuration, otherwise when the model is built (`backends/reference/whole_model.py`).
Architectures name sizes of recurrent states differently, so their computation depends on the names in a configuration.
A rank compares the results with the actual sizes before it serves.

Image features are computed by the model's `get_image_features`, and passed back to it as `mm_encoder_outputs`. So the
tower runs alone in the encode ranks, and the language model without it. Two conventions hold between them:

- The arrays of an image have the names of the keyword arguments of `get_image_features`. Small integer arrays among
  them (`image_grid_thw`, `image_sizes`) are an item's metadata, and not in the arena: positions and merging need them.
- The arrays of a frame group of a video are its pixels as bytes and the table of their values (`qwen_levels`). Features
  are those of `get_video_features` for a video of this group alone, or of `get_image_features` if there is no such
  method; only the first rows count, as a model may add rows after a video.
- A row of an embedding is `embedding_levels` times the hidden size of the language model: the token's embedding, then
  the features that are added in deeper layers (deepstack).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import CheckpointError, RequestRefused
from vsched.worker.contract import Companion

ATTENDING = frozenset({"full_attention", "sliding_attention", "hybrid"})
"""Layer types that keep keys and values: all later tokens attend to each token, or only within a window."""

STATEFUL = frozenset({"linear_attention", "conv", "hybrid"})
"""Layer types with a state of constant size, independent of the sequence's length."""

NEITHER = frozenset({"mlp", "moe"})
"""Layer types without keys, values or states."""


class LayerState(NamedTuple):
    """Number of state values per sequence in one layer: in the model's data type, and always in float32."""

    values: int
    float32_values: int = 0


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the type of each layer; empty if the configuration does not list them."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return tuple(kinds)


def shorter_window(config: Any) -> int | None:
    """Return the sliding window of a configuration; None if there is none shorter than the context."""
    window: int | None = getattr(config, "sliding_window", None)
    return None if window is None or window >= config.max_position_embeddings else window


def state_bytes(config: Any, itemsize: int) -> int | None:
    """Return the bytes of all layers' recurrent states per sequence; 0 without recurrent layers.

    None if the configuration has no known names for the sizes.
    """
    count = sum(kind in STATEFUL for kind in layer_kinds(config))
    if not count:
        return 0
    state = _layer_state(config)
    if state is None:
        return None
    return count * (state.values * itemsize + state.float32_values * 4)


def _layer_state(config: Any) -> LayerState | None:
    if hasattr(config, "conv_L_cache"):  # only a short convolution
        return LayerState(config.hidden_size * config.conv_L_cache)
    if hasattr(config, "linear_num_value_heads"):  # gated delta rule
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        recurrent = values * config.linear_key_head_dim
        return LayerState((2 * keys + values) * config.linear_conv_kernel_dim, recurrent)
    if hasattr(config, "mamba_d_head"):  # Mamba 2, with three sets of names
        inner = config.mamba_n_heads * config.mamba_d_head
        groups, size, kernel = config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv
        return LayerState((inner + 2 * groups * size) * kernel, inner * size)
    if hasattr(config, "mamba_head_dim"):
        inner = config.mamba_num_heads * config.mamba_head_dim
        size = config.ssm_state_size
        return LayerState((inner + 2 * config.n_groups * size) * config.conv_kernel, inner * size)
    if hasattr(config, "mamba_d_state"):  # Mamba 1
        inner = config.mamba_expand * config.hidden_size
        return LayerState(inner * config.mamba_d_conv, inner * config.mamba_d_state)
    if hasattr(config, "linear_head_dim"):  # Kimi delta attention
        inner = config.linear_num_heads * config.linear_head_dim
        return LayerState(3 * inner * config.linear_conv_kernel_dim, inner * config.linear_head_dim)
    if hasattr(config, "linear_attn_alpha_factor"):  # lightning attention
        heads = config.num_attention_heads
        head_dim = config.head_dim or config.hidden_size // heads
        return LayerState(heads * head_dim * head_dim)
    return None


LAYER_TYPES = ATTENDING | STATEFUL | NEITHER
"""Layer types that are supported."""

UNEQUAL = {
    "llama4_text": "temperatures that follow a token's place in the step",
    "ovis2": "features of its tower for tokens of the text around an image",
}
"""Architectures whose output differs from transformers' `generate` in a comparison, with the reason."""

FROM_THE_BATCH = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies change once any sequence of a batch exceeds the original length."""


def read_config(directory: Path, family: str) -> Any:
    """Return transformers' configuration object of a checkpoint.

    Raises:
        CheckpointError: When transformers has no such architecture, or cannot read it.
    """
    import transformers

    if family not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json: model_type {family!r} is not supported: transformers {transformers.__version__} lacks it, "
            "and code of a checkpoint is not run. Remedy: serve a checkpoint of a supported family; "
            "docs/models.md lists them."
        )
    try:
        config = transformers.CONFIG_MAPPING[family].from_pretrained(
            str(directory), local_files_only=True
        )
    except Exception as error:
        # Whatever exception transformers' class raises, the configuration cannot be read.
        raise CheckpointError(
            f"config.json cannot be read as a configuration of {family!r} ({type(error).__name__}). "
            "Remedy: download the checkpoint again."
        ) from error
    for part in (config, getattr(config, "text_config", config)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # `quantized.schemes` reads it
    return config


def text_config(directory: Path, family: str) -> Any:
    """Return transformers' configuration object of a language model on the generic path.

    Raises:
        CheckpointError: When it is not supported, with the reason.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = read_config(directory, family)
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise refusal(
            family, "a part for images or sound, which it shares with no supported family"
        )
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or config.is_encoder_decoder:
        raise refusal(family, "no decoder that writes text by itself")
    check_text(config, family)
    return config


def build_model(auto: Any, config: Any, family: str, **options: Any) -> Any:
    """Return a model of a class of transformers, such as `AutoModel`, on the current default device.

    Raises:
        CheckpointError: When the configuration names an activation or a rotary embedding that transformers lacks.
    """
    try:
        return auto.from_config(config, **options)
    except KeyError as error:
        raise refusal(family, f"a part that transformers lacks ({error})") from error


def check_text(config: Any, family: str) -> None:
    """Check that a language model, alone or as a part of another model, is supported.

    Raises:
        CheckpointError: When it is not, with the reason.
    """
    if config.model_type in UNEQUAL:
        raise refusal(family, UNEQUAL[config.model_type])
    kinds = set(layer_kinds(config))
    others = sorted(kinds - LAYER_TYPES)
    if others:
        raise refusal(
            family,
            f"layers that keep more than keys and values, or attend otherwise ({', '.join(others)})",
        )
    if kinds and not kinds & ATTENDING:
        raise refusal(family, NO_ATTENTION)
    for table in _rope_tables(config):
        if table.get("rope_type") == "longrope":
            _check_rope_factors(config, table)


def _rope_tables(config: Any) -> list[dict[str, Any]]:
    """Return the rotary embeddings of a model; some models have one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [each for each in rope.values() if isinstance(each, dict)] or [rope]


def _check_rope_factors(config: Any, table: dict[str, Any]) -> None:
    """Check that each frequency has a factor: transformers only logs it, and fails when it builds the model."""
    heads = config.hidden_size // config.num_attention_heads
    rotary_dim = (getattr(config, "head_dim", None) or heads) * table.get(
        "partial_rotary_factor", 1.0
    )
    wanted = len(range(0, int(rotary_dim), 2))
    for name in ("short_factor", "long_factor"):
        factors = table.get(name)
        if not isinstance(factors, list) or len(factors) != wanted:
            count = len(factors) if isinstance(factors, list) else repr(factors)
            raise CheckpointError.of_limit(
                f"config.json: {name} of longrope has another number of factors than the heads have frequencies",
                value=count,
                limit=wanted,
                remedy="download the checkpoint again, or correct rope_scaling",
            )


OWN_ATTENTION = "attention of its own, which does not go through transformers' interface"
NO_ATTENTION = "no layer that attends, and so no KV cache to share out"


def refusal(family: str, what: str) -> CheckpointError:
    """Return the error that a model cannot be served."""
    return CheckpointError(
        f"config.json: model_type {family!r} has {what}, and cannot be served. "
        "Remedy: serve a checkpoint of a supported family; docs/models.md lists them."
    )


def context_tokens(config: Any, family: str) -> int:
    """Return the maximum length of a sequence.

    If rotary frequencies would change beyond an original length, for all sequences of a step at a time, it is that
    length.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise refusal(family, "no limit on its positions (max_position_embeddings)")
    for table in _rope_tables(config):
        if table.get("rope_type") in FROM_THE_BATCH:
            original = table.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


class KeptValues(NamedTuple):
    """The number of key and value elements per token, and of their heads."""

    values: int
    heads: int


def kept_values(config: Any) -> KeptValues:
    """Return the sizes of all layers' keys and values per token.

    A rank compares them with the actual sizes before it serves.
    """
    count = sum(kind in ATTENDING for kind in layer_kinds(config)) or config.num_hidden_layers
    each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else ()
    layers = [_kept_by_layer(layer) for layer in each] or [_kept_by_layer(config)] * count
    return KeptValues(sum(one.values for one in layers), sum(one.heads for one in layers))


def _kept_by_layer(config: Any) -> KeptValues:
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention, with decompressed keys and values
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        return KeptValues(int(heads * (key + config.v_head_dim)), 2 * int(heads))
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False):
        kv_heads = 1
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KeptValues(int(2 * kv_heads * size), 2 * int(kv_heads))


EMBEDDED_SIZE = Companion("image_size", ("height", "width in pixels"))
"""The companion of an embedding in requests: the size of its image, from which all else follows."""

EMBEDDED_PIXELS_MAX = 1 << 24
"""Maximum pixels of such an image: a blank one of its size may have to be processed."""

FIRST_POSITIONS: Mapping[str, int] = {"paligemma": 1}
"""Architectures whose positions do not start at 0."""

SEE_IN_IMAGES = frozenset({"gemma3", "gemma4"})
"""Architectures with bidirectional attention within an image, unless their text configuration disables it."""

SEE_IN_PROMPTS = frozenset({"paligemma"})
"""Architectures with bidirectional attention within a prompt."""

VIDEO_GRID = "video_grid_thw"
"""The name of a frame group's grid of patches: [1, 3], of time, height and width."""

METADATA_VALUES = 32
"""Maximum size of an integer array that is metadata of an image; larger ones are masks and indices."""


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """Properties of a vision-language model.

    Attributes:
        config: transformers' configuration object of the whole model; `text` is its language model's.
        image_token_id: The placeholder token of an image's rows.
        embedding_levels: Rows that the encoder computes per token: 1, plus one for each deepstack level.
        item_atomic: Whether attention is bidirectional within an image; `prompt_atomic`: within a whole prompt.
    """

    config: Any
    text: Any
    image_token_id: int
    embedding_levels: int
    item_atomic: bool = False
    prompt_atomic: bool = False


def takes_images(family: str) -> bool:
    """Return whether transformers has an architecture as an image-text-to-text model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def vision_facts(directory: Path, family: str) -> VisionFacts:
    """Return the properties of a vision-language model on the generic path from its configuration.

    Raises:
        CheckpointError: When it is not supported, with the reason.
    """
    config = read_config(directory, family)
    text = config.get_text_config()
    if family in UNEQUAL:
        raise refusal(family, UNEQUAL[family])
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise refusal(family, "an encoder for text, to which a decoder attends")
    if getattr(text, "cross_attention_layers", None):
        raise refusal(family, "layers that attend to images apart from the text (cross-attention)")
    check_text(text, family)
    stated = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    token = next((each for each in stated if isinstance(each, int)), None)
    if token is None:
        raise CheckpointError(
            "config.json: image_token_id is missing. Remedy: download the checkpoint again."
        )
    vision = getattr(config, "vision_config", None)
    if getattr(vision, "model_type", "") == "timm_wrapper":
        raise refusal(family, "a vision tower of the package timm")
    deepstack = getattr(vision, "deepstack_visual_indexes", None) or ()
    sees = getattr(text, "use_bidirectional_attention", "vision")
    return VisionFacts(
        config,
        text,
        token,
        1 + len(deepstack),
        item_atomic=family in SEE_IN_IMAGES and sees in ("vision", False),
        prompt_atomic=family in SEE_IN_PROMPTS,
    )


def is_metadata(array: npt.NDArray[Any]) -> bool:
    """Return whether an array of an image is metadata: a small array of integers."""
    return array.dtype.kind in "iu" and array.size <= METADATA_VALUES


def embedded_size(companion: Sequence[int]) -> tuple[int, int]:
    """Return width and height of an image from the companion of its embedding.

    Raises:
        RequestRefused: When it has too many pixels.
    """
    height, width = companion
    if min(height, width) > 0 and height * width > EMBEDDED_PIXELS_MAX:
        raise RequestRefused.of_limit(
            "the image of the embeddings has too many pixels",
            value=f"{width}x{height}",
            limit=f"{EMBEDDED_PIXELS_MAX} pixels",
            remedy="make the image smaller before it is encoded, or send the image itself",
            code="image_size_exceeded",
        )
    return width, height


def pack_metadata(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return the small integer arrays of an image as metadata."""
    small = {
        name: (array.dtype.str, array.shape, array.tobytes())
        for name, array in sorted(arrays.items())
        if is_metadata(array)
    }
    return msgspec.msgpack.encode(small)


def unpack_metadata(metadata: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `pack_metadata` packed, read-only.

    Raises:
        msgspec.DecodeError: When it is no metadata.
    """
    packed = msgspec.msgpack.decode(metadata, type=dict[str, tuple[str, tuple[int, ...], bytes]])
    return {
        name: np.frombuffer(values, dtype=np.dtype(dtype)).reshape(shape)
        for name, (dtype, shape, values) in packed.items()
    }
