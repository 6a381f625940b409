"""The properties and generation settings of a checkpoint, read from its configuration files without torch or weights.

The stop tokens come from `generation_config.json`, or from `config.json` if it has none, and the tokenizer's EOS
token: some chat models end their turns with a token that only the tokenizer's settings name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vsched.errors import CheckpointError
from vsched.types import ModelInfo, SamplingDefaults
from vsched_workers.checkpoint.files import checkpoint_directory, read_if_there, read_json
from vsched_workers.checkpoint.images import (
    PROCESSOR_FILES,
    load_image_processor,
    stated_image_settings,
    tokens_max,
)
from vsched_workers.checkpoint.tokenizer_files import load_part, tokenizer_files
from vsched_workers.checkpoint.weights import (
    HEAD,
    WeightIndex,
    is_vision,
    tensor_headers,
    weight_files,
)
from vsched_workers.families import (
    FAMILIES,
    Family,
    LanguageFamily,
    family_of,
    language_family,
    model_type_of,
)
from vsched_workers.families.generic import (
    context_tokens,
    kept_values,
    read_config,
    refusal,
    state_bytes,
    takes_images,
    text_config,
    vision_facts,
)
from vsched_workers.families.qwen_image import (
    ResizeLimits,
    clamp_limits,
    pixel_limits,
    worst_tokens,
)
from vsched_workers.families.sharing import parallel_plan, shares_heads, unshared
from vsched_workers.families.video_processors import DEFAULTS as VIDEO_DEFAULTS
from vsched_workers.families.video_processors import REFUSED, VIDEO_PROCESSORS, VideoProcessor
from vsched_workers.quantized.schemes import check_scales, scheme_of

GENERATION_FILE = "generation_config.json"

_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 10.0),
}
"""Bounds that requests are subject to as well."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The relevant part of a tokenizer.json; the rest is skipped."""

    added_tokens: list[_AddedToken] = []


def stop_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the stop tokens, without duplicates; empty if the checkpoint has none.

    Raises:
        CheckpointError: When a file that may name them cannot be read.
    """
    stated = next((ids for table in _tables(directory, config) if (ids := _ids(table))), ())
    return tuple(dict.fromkeys((*stated, *_tokenizer_end(directory))))


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Return the sampling parameters in `generation_config.json`.

    `do_sample` is ignored: a request asks for greedy decoding by temperature 0.

    Raises:
        CheckpointError: When a value is out of bounds.
    """
    table = read_if_there(directory, GENERATION_FILE)
    stated: dict[str, Any] = {}
    for name, (low, high) in _BOUNDS.items():
        value = table.get(name)
        if value is None:
            continue
        kinds = (int,) if name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise CheckpointError.of_limit(
                f"{GENERATION_FILE}: {name} is out of bounds",
                value=repr(value),
                limit=f"{low} to {high}",
                remedy="correct it there, or take it out",
            )
        stated[name] = value
    if stated.get("top_p") == 0:  # the lowest value: greedy decoding
        stated |= {"top_p": 1.0, "top_k": 1}
    if "top_k" in stated:
        stated["top_k"] = max(stated["top_k"], 0)  # -1 means none, too
    return SamplingDefaults(**stated)


def _tables(directory: Path, config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield read_if_there(directory, GENERATION_FILE)
    yield config
    text = config.get("text_config")
    if isinstance(text, Mapping):
        yield text


def _ids(table: Mapping[str, Any]) -> tuple[int, ...]:
    stated = table.get("eos_token_id")
    tokens = stated if isinstance(stated, list) else [stated] if isinstance(stated, int) else []
    return tuple(int(token) for token in tokens if int(token) >= 0)  # -1 stands for none


def _tokenizer_end(directory: Path) -> tuple[int, ...]:
    """Return the id of the tokenizer's EOS token, if its settings name one."""
    settings = read_if_there(directory, "tokenizer_config.json")
    token = _content(settings.get("eos_token"))
    if token is None:
        return ()
    added = settings.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        found = [int(key) for key, one in added.items() if _content(one) == token]
    elif (directory / "tokenizer.json").is_file():
        content = (directory / "tokenizer.json").read_bytes()
        try:
            listed = msgspec.json.decode(content, type=_AddedTokens).added_tokens
        except msgspec.MsgspecError:
            listed = []  # loading the tokenizer reports the error
        found = [one.id for one in listed if one.content == token]
    else:
        found = []
    return tuple(found[:1])


def _content(token: object) -> object:
    """Return the text of a token, which settings state alone or with its options."""
    return token.get("content") if isinstance(token, Mapping) else token


DTYPES = ("float32", "bfloat16", "float16")
RANKS_MAX = 64
"""The largest number of ranks that an error message lists."""

PROCESSOR_DEFAULT_LIMITS = ResizeLimits(minimum=56 * 56, maximum=28 * 28 * 1280)
"""Default limits of the Qwen-VL image processors."""


def processor_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the image processor.

    Raises:
        CheckpointError: When the checkpoint has none.
    """
    stated = stated_image_settings(path)
    if stated is None:
        raise CheckpointError(
            f"no image processor settings ({' or '.join(PROCESSOR_FILES)}). "
            "Remedy: give the directory of a complete checkpoint."
        )
    return stated


def stated_video_settings(path: Path) -> Mapping[str, Any]:
    """Return the settings of the video processor in the checkpoint.

    Without settings of its own, it takes those of the image processor, as transformers does.
    """
    nested = read_if_there(path, PROCESSOR_FILES[0]).get("video_processor")
    if isinstance(nested, Mapping):
        return nested
    return read_if_there(path, "video_preprocessor_config.json") or processor_settings(path)


def video_settings(path: Path, processor: VideoProcessor) -> dict[str, Any]:
    """Return all settings of the video processor: the defaults of its class, and those of the checkpoint."""
    stated = stated_video_settings(path)
    given = {key: value for key, value in stated.items() if value is not None}
    sampling = given.get("video_sampling")
    if isinstance(sampling, Mapping):
        own = {"fps": "fps", "max_frames": "num_frames", "video_size": "size"}
        given = {name: sampling[key] for key, name in own.items() if key in sampling} | given
    return {**VIDEO_DEFAULTS, **processor.defaults, **given}


def video_processor_of(path: Path, family: str) -> VideoProcessor | str:
    """Return the class of the video processor of a checkpoint on the generic path, or why it takes no videos."""
    usual = next((name for name, each in VIDEO_PROCESSORS.items() if family in each.families), None)
    if usual is None:
        return REFUSED.get(family, "not supported for this architecture")
    name = str(stated_video_settings(path).get("video_processor_type") or usual)
    return VIDEO_PROCESSORS.get(name, f"the video processor {name} is not known")


def choose_dtype(config: Mapping[str, Any], dtype: str) -> str:
    """Return the name of the data type to load; `auto` is the checkpoint's own.

    Raises:
        CheckpointError: When the type is not supported.
    """
    name = dtype
    if dtype == "auto":
        text = config.get("text_config")
        nested = text if isinstance(text, Mapping) else {}
        tables = (config, nested)
        stated = [table.get(key) for table in tables for key in ("dtype", "torch_dtype")]
        name = next((str(value) for value in stated if value), "float32")
        if name == "float16" and scheme_of(config) is not None:
            name = "bfloat16"  # which the products of quantized weights support
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(
            f"data type {name!r} is not supported. Supported: {', '.join(DTYPES)}. "
            "Remedy: name one of them instead of `auto`."
        )
    return name


def image_factor(family: Family, config: Mapping[str, Any]) -> int:
    """Return the side, in pixels, of the square that corresponds to one token."""
    patch = int(family.vision(config, "patch_size"))
    return patch * int(family.vision(config, "spatial_merge_size"))


def image_limits(
    family: Family,
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    item_tokens_max: int,
    *,
    frames: bool = False,
) -> ResizeLimits:
    """Return the area limits of one image, clamped to the budget; of one frame of any video with `frames`."""
    limits = pixel_limits(settings, PROCESSOR_DEFAULT_LIMITS)
    factor = image_factor(family, config)
    if frames and family.video_processor.sizes == "video":
        # Limits of all frames together, of which there are at least those of one group.
        group = int(settings["temporal_patch_size"])
        most = None if limits.maximum is None else max(limits.maximum // group, 1)
        limits = ResizeLimits(min(limits.minimum, factor * factor), most)
    return clamp_limits(limits, tokens=item_tokens_max, factor=factor)


def inspect_checkpoint(path: str, *, dtype: str, item_tokens_max: int) -> ModelInfo:
    """Read the checkpoint's properties without loading weights.

    Raises:
        CheckpointError: When there is no such checkpoint, its family is unsupported, or files are missing.
        ConfigError: When the token limit of one image is negative.
    """
    directory = checkpoint_directory(path)
    config = read_json(directory, "config.json")
    try:
        if model_type_of(config) in FAMILIES:
            info = _inspect(directory, config, family_of(config), dtype, item_tokens_max)
        else:
            info = _inspect_any(directory, config, dtype, item_tokens_max)
        return msgspec.structs.replace(info, **_weight_facts(directory, config, info.itemsize))
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise CheckpointError(
            "config.json or the processor settings hold a value of the wrong type "
            f"({type(error).__name__}). Remedy: download the checkpoint again."
        ) from error


def _weight_facts(directory: Path, config: dict[str, Any], itemsize: int) -> dict[str, Any]:
    """Return the fields of `ModelInfo` about the weights."""
    scheme = scheme_of(config)
    sizes, ties_head = {True: 0, False: 0}, True
    headers = [*tensor_headers(weight_files(directory))]
    check_scales({name: dtype for name, _, dtype in headers}, scheme)
    for name, shape, dtype in headers:
        vision = is_vision(name)
        if scheme is None:
            sizes[vision] += math.prod(shape) * itemsize
        else:
            sizes[vision] += scheme.loaded_bytes(name, shape, dtype, vision=vision)
        ties_head = ties_head and not name.endswith(HEAD)
    return {
        "vision_bytes": sizes[True],
        "language_bytes": sizes[False],
        "ties_head": ties_head,
    }


def _inspect(
    directory: Path, config: dict[str, Any], family: Family, dtype: str, item_tokens_max: int
) -> ModelInfo:
    _check_files(directory, config, family.unsupported(config))
    settings = processor_settings(directory)
    chosen = choose_dtype(config, dtype)
    itemsize = 4 if chosen == "float32" else 2
    context = int(family.text(config, "max_position_embeddings"))
    limits = image_limits(family, config, settings, item_tokens_max)
    worst = worst_tokens(limits, factor=image_factor(family, config)) or context
    kv_heads = int(family.text(config, "num_key_value_heads"))
    layers = int(family.text(config, "num_hidden_layers"))
    image_token = config.get("image_token_id")
    if not isinstance(image_token, int):
        raise CheckpointError(
            "config.json: image_token_id is missing. Remedy: download the checkpoint again."
        )
    video_token = config.get("video_token_id")
    return ModelInfo(
        family=family.name,
        path=str(directory),
        dtype=chosen,
        hidden_size=int(family.text(config, "hidden_size")),
        embedding_levels=family.embedding_levels(config),
        vocab_size=int(family.text(config, "vocab_size")),
        context_tokens=context,
        kv_bytes_per_token=2 * layers * kv_heads * family.head_dim(config) * itemsize,
        kv_heads_per_token=2 * layers * kv_heads,
        item_tokens_max=min(worst, item_tokens_max) if item_tokens_max else worst,
        image_token_id=image_token,
        video_token_id=video_token if isinstance(video_token, int) else None,
        stop_token_ids=stop_token_ids(directory, config),
        sampling=sampling_defaults(directory),
    )


def _inspect_any(
    directory: Path, config: dict[str, Any], dtype: str, item_tokens_max: int
) -> ModelInfo:
    """Read the properties of a text model, or of any model on the generic path."""
    family = model_type_of(config)
    if not family:
        raise CheckpointError(
            "config.json: model_type is missing. Remedy: give the directory of a complete checkpoint."
        )
    language, vision = language_family(family, str(directory)), None
    text: Any
    if language is not None:
        text = language.model_config(str(directory))
    elif takes_images(family):
        vision = vision_facts(directory, family)
        text = vision.text
    else:
        text = text_config(directory, family)
    _check_files(directory, config)
    chosen = choose_dtype(config, dtype)
    itemsize = 4 if chosen == "float32" else 2
    states, kept = state_bytes(text, itemsize), kept_values(text)
    if states is None:
        raise refusal(family, "layers with a state of a kind that is not known")
    info = ModelInfo(
        family=family,
        path=str(directory),
        dtype=chosen,
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        context_tokens=context_tokens(text, family),
        kv_bytes_per_token=kept.values * itemsize,
        kv_heads_per_token=kept.heads,
        shares_kv=bool(_usual_sizes(language)) or shares_heads(text),
        state_bytes=states,
        stop_token_ids=stop_token_ids(directory, config),
        sampling=sampling_defaults(directory),
    )
    if vision is None:
        return info
    tokenizer = load_part("AutoTokenizer", directory, "tokenizer")
    processor = load_image_processor(directory, family, tokenizer, vision.image_token_id)
    video_token = None
    is_described = isinstance(video_processor_of(directory, family), VideoProcessor)
    if processor.video_marker and is_described:
        token_of = tokenizer.backend_tokenizer.token_to_id
        video_token = token_of(processor.video_marker) or token_of(processor.marker)
    return msgspec.structs.replace(
        info,
        embedding_levels=vision.embedding_levels,
        item_tokens_max=tokens_max(processor, item_tokens_max),
        item_atomic=vision.item_atomic,
        prompt_atomic=vision.prompt_atomic,
        image_token_id=vision.image_token_id,
        video_token_id=video_token,
    )


def model_types(info: ModelInfo) -> list[str]:
    """Return the architectures that a model on the generic path consists of, beginning with its own."""
    if not info.takes_images:
        return [info.family]
    from transformers import CONFIG_MAPPING

    config = vision_facts(checkpoint_directory(info.path), info.family).config
    parts = (getattr(config, name, None) for name in ("text_config", "vision_config"))
    found = [getattr(part, "model_type", "") for part in parts]
    return [info.family, *(each for each in found if each in CONFIG_MAPPING)]


def _check_files(
    directory: Path, config: Mapping[str, Any], unsupported: str | None = None
) -> None:
    """Check that tokenizer and weights exist; `unsupported` names an unsupported feature of the model."""
    tokenizer_files(directory)
    if unsupported is not None:
        raise CheckpointError(
            f"config.json: {unsupported} are not supported. Remedy: serve a checkpoint without."
        )
    scheme_of(config)
    WeightIndex.open(directory)


def check_parallel(info: ModelInfo, *, stage: str, ranks: int) -> None:
    """Check that a stage, `encode` or `generate`, can be shared by `ranks` ranks.

    Raises:
        CheckpointError: When the weights are quantized experts or for the generic path; or when a size is not
            divisible: the message lists all such sizes and possible numbers of ranks.
    """
    if stage == "generate" and ranks > 1:
        _check_shareable(info, ranks)
    sizes = _shared_sizes(info, stage)
    wrong = [f"{name} is {size}" for name, size in sizes.items() if size % ranks]
    if not wrong:
        return
    common = math.gcd(*sizes.values())
    allowed = [str(count) for count in range(1, min(common, RANKS_MAX) + 1) if common % count == 0]
    raise CheckpointError(
        f"config.json: {', '.join(wrong)}, which {ranks} ranks cannot share equally. "
        f"Remedy: set {stage}.tensor_parallel to one of {', '.join(allowed)}."
    )


def _check_shareable(info: ModelInfo, ranks: int) -> None:
    family = language_family(info.family, info.path)
    is_shared = family is not None and family.language_sharing.sizes and not family.decoder.experts
    if not is_shared and scheme_of(read_json(checkpoint_directory(info.path), "config.json")):
        raise CheckpointError(
            f"generate.tensor_parallel: {ranks} ranks cannot share the quantized weights of this checkpoint. "
            "Remedy: set it to 1."
        )


def _shared_sizes(info: ModelInfo, stage: str) -> dict[str, int]:
    """Return the sizes that the number of ranks must divide, by name; empty if the model cannot be shared."""
    if info.family in FAMILIES:
        config = read_json(checkpoint_directory(info.path), "config.json")
        family = family_of(config)
        part = "vision_config" if stage == "encode" else "text_config"
        sharing = family.vision_sharing if stage == "encode" else family.language_sharing
        read = family.vision if stage == "encode" else family.text
        return {f"{part}.{key}": int(read(config, key)) for key in sharing.sizes}
    directory = checkpoint_directory(info.path)
    if stage == "encode":
        raise CheckpointError(
            f"config.json: the vision tower of model_type {info.family!r} runs on one rank only. "
            "Remedy: set encode.tensor_parallel to 1."
        )
    keys = _usual_sizes(language_family(info.family, info.path))
    stated = read_config(directory, info.family).get_text_config()
    if not keys:
        if info.takes_images:
            raise unshared(
                info.family, "models that take images are not shared by transformers' plan"
            )
        if info.state_bytes:
            raise unshared(info.family, "layers with a state are not shared by transformers' plan")
        parallel_plan(stated, info.family)
        keys = HEADS if shares_heads(stated) else ()
    return {key: int(getattr(stated, key)) for key in keys}


HEADS = ("num_attention_heads", "num_key_value_heads")
"""Sizes to divide if attention heads are shared; a rank checks the others when it builds the model."""


def _usual_sizes(language: LanguageFamily | None) -> Sequence[str]:
    """Return the sizes that ranks must divide in a decoder-only model with a decoder description; empty for others."""
    return () if language is None else language.language_sharing.sizes
