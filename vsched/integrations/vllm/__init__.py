"""vsched's policies inside vLLM: `vllm serve MODEL --scheduler-cls vsched.integrations.vllm.Scheduler`.

The classes of this package that vLLM names import vLLM when they are first used.
"""

from __future__ import annotations

import importlib

_CLASSES = {
    "Scheduler": "vsched.integrations.vllm.scheduler:PolicyScheduler",
    "EmbeddingCache": "vsched.integrations.vllm.embeddings:PolicyEncoderCache",
    "Middleware": "vsched.integrations.vllm.middleware:Middleware",
}


def __getattr__(name: str) -> object:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, cls = _CLASSES[name].partition(":")
    return getattr(importlib.import_module(module), cls)
