"""The preprocessing of a checkpoint: chat template, tokenizer, image processor.

Tokenizer and image processor are loaded separately: the combined one needs torchvision. Placeholders are expanded here.
"""

from vsched_workers.checkpoint.preprocess.generic import AnyPreprocessor
from vsched_workers.checkpoint.preprocess.loading import load_preprocessor
from vsched_workers.checkpoint.preprocess.qwen import QwenPreprocessor
from vsched_workers.checkpoint.preprocess.text import TextPreprocessor

__all__ = ["AnyPreprocessor", "QwenPreprocessor", "TextPreprocessor", "load_preprocessor"]
