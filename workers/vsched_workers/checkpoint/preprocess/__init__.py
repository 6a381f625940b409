"""The preprocessing of a checkpoint: chat template, tokenizer, image processor.

Tokenizer and image processor are loaded separately: the combined one needs torchvision. Placeholders are expanded here.
"""

from __future__ import annotations

from vsched.errors import CheckpointError
from vsched.types import ModelInfo
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.checkpoint.preprocess.generic import AnyPreprocessor, load_images
from vsched_workers.checkpoint.preprocess.qwen import QwenPreprocessor, load_qwen
from vsched_workers.checkpoint.preprocess.text import TextPreprocessor
from vsched_workers.checkpoint.tokenizer_files import load_tokenizer
from vsched_workers.families import FAMILIES

__all__ = ["AnyPreprocessor", "QwenPreprocessor", "load_preprocessor"]


def load_preprocessor(info: ModelInfo) -> TextPreprocessor:
    """Load tokenizer, chat template and, if the model takes images, image processor, clamped to `info.item_tokens_max`.

    Raises:
        CheckpointError: When tokenizer or processor are missing or cannot be loaded.
    """
    try:
        return _loaded(info)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            "the tokenizer's or the processor's settings hold a value of the wrong type "
            f"({type(error).__name__}). Remedy: download the checkpoint again."
        ) from error


def _loaded(info: ModelInfo) -> TextPreprocessor:
    directory = checkpoint_directory(info.path)
    tokenizer = load_tokenizer(
        directory,
        vocab_size=info.vocab_size,
        chat_template=info.chat_template,
        plain=not info.takes_images or info.family in FAMILIES,
    )
    if not info.takes_images:
        return TextPreprocessor(info, tokenizer)
    if info.family in FAMILIES:
        return load_qwen(info, directory, tokenizer)
    return AnyPreprocessor(info, tokenizer, load_images(info, tokenizer))
