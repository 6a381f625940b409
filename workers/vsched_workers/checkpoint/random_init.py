"""Creation of checkpoints of named sizes with random weights, offline.

They have all parts of a published checkpoint (weights, tokenizer, chat template, processor settings), so that the whole
system can be run and tested without a download. Their output is meaningless.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vsched.errors import CheckpointError
from vsched_workers.checkpoint.files import new_checkpoint, without_bars
from vsched_workers.families import FAMILIES

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}{{ raise_exception('unsupported content part: ' + part['type']) }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SMALL_TEXT = """
What is in the image? Describe the image in one sentence. The picture shows a red square on a blue field, a green
circle and some text. How many objects are there? There are three objects in the picture: one is large and two are
small. You are a helpful assistant. Answer the question with a single word. The first image is brighter than the
second image. Compare the two images and tell me what changed. Nothing has changed between them, except the colour
of the sky. Please read the words on the sign. The sign says: stop here. Is this a photograph or a drawing? It is a
drawing of a house, with a door, a roof and four windows. Thank you; that was all. 0 1 2 3 4 5 6 7 8 9 10 11 12 100
1000, naïve café, größer.
"""


@dataclass(frozen=True)
class Size:
    """A named size.

    Attributes:
        learns_from_library: Whether the tokenizer is trained on Python's standard library or, faster, on a short text.
        image_limits: Minimum and maximum pixels of a resized image.
        spread: Standard deviation of the weights. Small models need a larger one, or every output is the same.
        filled: Whether the vocabulary is filled up with unused words, if training yields fewer.
    """

    family: str
    summary: str
    vocab: int
    text: dict[str, Any]
    vision: dict[str, Any]
    learns_from_library: bool = True
    image_limits: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
    spread: float = 0.02
    filled: bool = False


def _text(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, mrope: list[int]
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": mrope},
    }


def _vision(
    depth: int, hidden: int, inner: int, heads: int, out: int, **more: object
) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
        "out_hidden_size": out,
        **more,
    }


def _windows(full: list[int]) -> dict[str, Any]:
    return {"fullatt_block_indexes": full, "window_size": 112}


def _deepstack(levels: list[int]) -> dict[str, Any]:
    return {"deepstack_visual_indexes": levels, "num_position_embeddings": 2304}


def _experts(count: int, chosen: int, inner: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner}


_LEARNT_MAX = 8192
"""Vocabulary size that a tokenizer can be trained to in a second or two."""

QWEN3_LIMITS = (65536, 16777216)

SIZES: dict[str, Size] = {
    "nano25": Size(
        family="qwen2_5_vl",
        summary="Qwen2.5-VL, the smallest that exercises everything; for tests",
        vocab=384,
        text=_text(64, 96, 2, 4, 2, [2, 3, 3]),
        vision=_vision(2, 32, 48, 2, 64, **_windows([1])),
        learns_from_library=False,
        spread=0.2,
    ),
    "nano3": Size(
        family="qwen3_vl",
        summary="Qwen3-VL, the smallest that exercises everything; for tests",
        vocab=384,
        text=_text(64, 96, 3, 4, 2, [4, 2, 2]) | {"head_dim": 16},
        vision=_vision(3, 32, 48, 2, 64, **_deepstack([0, 1])),
        learns_from_library=False,
        spread=0.2,
        image_limits=(4 * 32 * 32, 16777216),
    ),
    "nano3moe": Size(
        family="qwen3_vl_moe",
        summary="Qwen3-VL with a mixture of experts, the smallest that exercises everything; for tests",
        vocab=384,
        text=_text(64, 96, 3, 4, 2, [4, 2, 2])
        | {"head_dim": 16, "mlp_only_layers": [1]}
        | _experts(8, 2, 24),
        vision=_vision(3, 32, 48, 2, 64, **_deepstack([0, 1])),
        learns_from_library=False,
        spread=0.2,
        image_limits=(4 * 32 * 32, 16777216),
    ),
    "tiny25": Size(
        family="qwen2_5_vl",
        summary="Qwen2.5-VL of 5 million parameters; measures the overhead of the framework",
        vocab=4096,
        text=_text(256, 704, 4, 4, 2, [8, 12, 12]),
        vision=_vision(4, 128, 344, 4, 256, **_windows([3])),
    ),
    "tiny3": Size(
        family="qwen3_vl",
        summary="Qwen3-VL of 7 million parameters, with deepstack",
        vocab=4096,
        text=_text(256, 704, 6, 4, 2, [12, 10, 10]) | {"head_dim": 64},
        vision=_vision(6, 128, 344, 4, 256, **_deepstack([1, 2, 3])),
        image_limits=QWEN3_LIMITS,
    ),
    "small25": Size(
        family="qwen2_5_vl",
        summary="Qwen2.5-VL of 50 million parameters; a faster mid25",
        vocab=8192,
        text=_text(512, 2048, 10, 8, 2, [8, 12, 12]),
        vision=_vision(8, 320, 864, 4, 512, **_windows([3, 7])),
    ),
    "mid25": Size(
        family="qwen2_5_vl",
        summary="Qwen2.5-VL of 400 million parameters; measures the cost of computation",
        vocab=8192,
        text=_text(1024, 4096, 20, 8, 2, [16, 24, 24]),
        vision=_vision(16, 640, 1728, 8, 1024, **_windows([3, 7, 11, 15])),
    ),
    "3b25": Size(
        family="qwen2_5_vl",
        summary="Qwen2.5-VL of the published 3B sizes, 7.5 GB; for a GPU",
        vocab=151_936,
        text=_text(2048, 11008, 36, 16, 2, [16, 24, 24]),
        vision=_vision(32, 1280, 3420, 16, 2048, **_windows([7, 15, 23, 31])),
        filled=True,
    ),
}


def make_checkpoint(path: str, size: str, *, dtype: str = "bfloat16", seed: int = 0) -> int:
    """Write a checkpoint of a named size to a directory; return its number of parameters.

    The same size, type and seed give the same weights; a tokenizer that is trained on the standard library depends on
    the Python version.

    Raises:
        CheckpointError: When there is no such size or type, or the directory holds a checkpoint already.
    """
    chosen = SIZES.get(size)
    if chosen is None:
        raise CheckpointError(f"unknown size {size!r}. Known: {', '.join(SIZES)}.")
    if dtype not in {"float32", "bfloat16", "float16"}:
        raise CheckpointError(f"unknown data type {dtype!r}. Known: float32, bfloat16, float16.")
    with new_checkpoint(path) as directory:
        tokenizer = _make_tokenizer(chosen)
        tokenizer.save_pretrained(directory)
        _write_processor(directory, chosen)
        return _write_model(directory, chosen, tokenizer, dtype, seed)


def _library_text() -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]:
        yield file.read_text(encoding="utf-8", errors="ignore")


def _make_tokenizer(size: Size) -> Any:
    from tokenizers import pre_tokenizers

    text = _library_text() if size.learns_from_library else iter([SMALL_TEXT])
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt = min(size.vocab, _LEARNT_MAX) if size.filled else size.vocab
    return learnt_tokenizer(text, cut, words=learnt, longest=32768, filled=size.vocab * size.filled)


def learnt_tokenizer(
    texts: Iterable[str], cut: Any, *, words: int, longest: int, filled: int = 0
) -> Any:
    """Train a byte-level tokenizer on texts; return it with special tokens and chat template.

    Args:
        texts: The training texts.
        cut: Pre-tokenizer; its last stage is byte-level.
        words: Size of the vocabulary.
        longest: Maximum tokens of a prompt.
        filled: Final size of the vocabulary; words without a merge are only ever generated.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < filled:
        content = json.loads(tokenizer.to_str())
        vocabulary = content["model"]["vocab"]
        for token in range(tokenizer.get_vocab_size(), filled):
            vocabulary[f"\u0120{token}w"] = token  # a space in the byte-level alphabet
        tokenizer = Tokenizer.from_str(json.dumps(content))
    make: Any = transformers.PreTrainedTokenizerFast
    wrapped = make(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106  # a token of text, not a secret
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=longest,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _write_processor(directory: Path, size: Size) -> None:
    content = processor_settings(size.image_limits, is_qwen3=size.family != "qwen2_5_vl")
    with (directory / "processor_config.json").open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)


def processor_settings(limits: tuple[int, int], *, is_qwen3: bool) -> dict[str, Any]:
    """Return the processor's settings, written out: the class that would write them needs torchvision.

    `limits` are the minimum and maximum pixels of an image.
    """
    minimum, maximum = limits
    settings: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3 if is_qwen3 else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5] * 3 if is_qwen3 else [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 16 if is_qwen3 else 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": minimum, "longest_edge": maximum},
    }
    names = ("Qwen3VL", "Qwen3VL") if is_qwen3 else ("Qwen2_5_VL", "Qwen2VL")
    return {
        "processor_class": f"{names[0]}Processor",
        "image_processor": settings,
        "video_processor": {
            "video_processor_type": f"{names[1]}VideoProcessor",
            "size": {
                "shortest_edge": minimum,
                "longest_edge": 24576 * 32 * 32 if is_qwen3 else maximum,
            },
        },
    }


def _write_model(directory: Path, size: Size, tokenizer: Any, dtype: str, seed: int) -> int:
    import torch

    text = size.text | {
        "vocab_size": size.vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "initializer_range": size.spread,
    }
    if size.family != "qwen2_5_vl":
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_interleaved": True}
    vision = size.vision | {"initializer_range": size.spread}
    model = random_model(size.family, text, vision, tokenizer, seed=seed)
    with without_bars():
        model.to(getattr(torch, dtype)).save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def random_model(
    family: str, text: dict[str, Any], vision: dict[str, Any], tokenizer: Any, *, seed: int
) -> Any:
    """Return transformers' model of a family with random weights in float32.

    `text` and `vision` are entries of the parts of its configuration, besides the tokens.
    """
    import torch
    import transformers

    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    library: Any = transformers
    name = FAMILIES[family].library_prefix
    ends = {"bos_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(library, f"{name}Config")(
        text_config=text | ends | {"rope_parameters": dict(text["rope_parameters"])},
        vision_config=dict(vision),
        tie_word_embeddings=True,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(library, f"{name}ForConditionalGeneration")(config)
    model.generation_config = library.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model
