"""Description of a checkpoint from its files alone, without reading weights, even if it cannot be served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from vsched.checkpoint_tools import CheckpointDescription
from vsched.errors import CheckpointError
from vsched_workers.checkpoint.facts import video_processor_of
from vsched_workers.checkpoint.files import checkpoint_directory, read_json
from vsched_workers.checkpoint.tokenizer_files import chat_templates, tokenizer_files
from vsched_workers.checkpoint.weights import is_vision, tensor_headers, weight_files
from vsched_workers.families import FAMILIES, language_family, model_type_of
from vsched_workers.families.decoders import SLIDING
from vsched_workers.families.generic import read_config
from vsched_workers.families.video_processors import REFUSED
from vsched_workers.quantized.schemes import FORMATS, GROUPS, Scheme, scheme_of

_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8"}
_DTYPES |= {"F8_E4M3": "fp8"}
GROUP_SIZES = range(16, 129, 16)
"""Values of `weights_group` other than 0."""
_ENDS = ("embed_tokens.weight", "lm_head.weight")
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "vocab_size",
    "max_position_embeddings",
)


def describe_checkpoint(path: str) -> CheckpointDescription:
    """Return the properties of a checkpoint that can be read from its files.

    Raises:
        CheckpointError: When there is no checkpoint, or its `config.json` cannot be read.
    """
    directory = checkpoint_directory(path)
    config = read_json(directory, "config.json")
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    model_type = model_type_of(config)
    stated = config.get("architectures")
    parameters: Counter[str] = Counter()
    types: Counter[str] = Counter()
    files = weight_files(directory)
    bits: dict[str, Counter[str]] = {"vision": Counter(), "language": Counter()}
    scheme = _scheme(config)
    for name, shape, dtype in tensor_headers(files, skip_corrupt=True):  # loading reports it
        part, count = "vision" if is_vision(name) else "language", prod(shape)
        values = count if scheme is None else scheme.parameters(name, count, dtype)
        parameters[part] += values
        is_packed = scheme is not None and dtype in {"I32", "U8"}
        types[scheme.kind if scheme and is_packed else _DTYPES.get(dtype, dtype)] += values
        if scheme is not None:
            vision = part == "vision"
            bits[part]["auto"] += 8 * scheme.loaded_bytes(name, shape, dtype, vision=vision)
        for kind in FORMATS:
            bits[part][kind] += quantized_bits(name, shape, kind)
            for group in GROUP_SIZES:
                bits[part][f"{kind}/{group}"] += quantized_bits(name, shape, kind, group=group)
    try:
        tokenizer = tokenizer_files(directory)
        templates = tuple(sorted(chat_templates(directory)))
    except CheckpointError:
        tokenizer, templates = "", ()  # loading the checkpoint reports the error
    return CheckpointDescription(
        model_type=model_type,
        architecture=str(stated[0]) if isinstance(stated, list) and stated else "",
        path=_path_of(model_type, directory),
        parameters=dict(parameters),
        dtypes=dict(+types),
        files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        sizes={key: text[key] for key in _SIZES if isinstance(text.get(key), int)},
        tokenizer=tokenizer,
        chat_templates=templates,
        windows=_windows(model_type, directory),
        unsupported=tuple(_unsupported(directory, config)),
        weights_bytes={
            part: {kind: count // 8 for kind, count in found.items()}
            for part, found in bits.items()
        },
    )


def _scheme(config: Mapping[str, Any]) -> Scheme | None:
    try:
        return scheme_of(config)
    except CheckpointError:
        return None  # loading the checkpoint reports the error


def quantized_bits(name: str, shape: Sequence[int], kind: str, *, group: int = 0) -> int:
    """Return the approximate number of bits of a tensor if weights are quantized to this kind on loading.

    `group` is the group size of the scales, 0 for the default.
    """
    count = prod(shape)
    if len(shape) not in {2, 3}:  # a matrix, or the matrices of experts
        return 16 * count
    kind = "int8" if name.endswith(_ENDS) else kind
    inputs = shape[-1]
    outputs = count // inputs if inputs else 0
    scales = outputs * -(-inputs // (group or GROUPS[kind]))
    return count * int(kind.removeprefix("int")) + 16 * scales


def _path_of(model_type: str, directory: Path) -> str:
    """Return the kind of implementation for its language model."""
    try:
        family = language_family(model_type, str(directory))
    except CheckpointError:
        family = None  # loading the checkpoint reports the error
    if family is None:
        return "generic"
    return "modules" if family.decoder.experts else "fused"


def _windows(model_type: str, directory: Path) -> tuple[int, int]:
    """Return the size of sliding windows in tokens, and the number of layers with one."""
    try:
        text = read_config(directory, model_type).get_text_config()
    except CheckpointError:
        return 0, 0  # loading the checkpoint reports the error
    window = getattr(text, "sliding_window", None)
    if not isinstance(window, int) or window >= (getattr(text, "max_position_embeddings", 0) or 0):
        return 0, 0
    kinds = getattr(text, "layer_types", None)
    layers = kinds.count(SLIDING) if kinds else text.num_hidden_layers
    return (window, layers) if layers else (0, 0)


def _unsupported(directory: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield features of the checkpoint that are not supported."""
    has_videos = config.get("video_token_id") is not None or "video_token_index" in config
    family = model_type_of(config)
    if (has_videos or family in REFUSED) and family not in FAMILIES:
        try:
            found = video_processor_of(directory, family)
        except CheckpointError:
            found = "no settings of a video processor"
        if isinstance(found, str):
            yield f"videos ({found})"
    if any(key in config for key in ("audio_config", "audio_token_id", "audio_token_index")):
        yield "audio"
    text = config.get("text_config")
    tables = (config, text if isinstance(text, Mapping) else {})
    if any(table.get("num_nextn_predict_layers") for table in tables):
        yield "prediction of several tokens at a time (num_nextn_predict_layers)"
    if config.get("auto_map"):
        yield "the checkpoint's own code (auto_map), which is not run"
    if (directory / "adapter_config.json").is_file():
        yield "adapters (adapter_config.json)"
