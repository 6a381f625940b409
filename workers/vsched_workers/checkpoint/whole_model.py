"""Loads a model of any architecture that transformers has, with its head, by transformers' own loading.

That knows the names that an architecture's tensors have had, experts that lie in files one by one, and tied weights.
What it does quietly is an error here: a tensor that is missing would be random.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from vsched.errors import CheckpointError
from vsched.worker.contract import Progress
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.families.generic import refusal, text_config

if TYPE_CHECKING:
    import torch

LABEL = "loading the language model"


def build_whole(path: str, family: str) -> Any:
    """Return an architecture without weights, on the meta device.

    Raises:
        CheckpointError: When it cannot run on paged attention.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = text_config(checkpoint_directory(path), family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if model._is_stateful:  # noqa: SLF001 # how transformers itself tells
        raise refusal(family, "a recurrent state")
    return model


def load_whole(
    built: Any, path: str, *, attention: str, dtype: torch.dtype, device: str, progress: Progress
) -> Any:
    """Return the model with its weights; `built` is what `build_whole` returned.

    Raises:
        CheckpointError: When tensors are missing or of another shape, or a file cannot be read.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    progress(LABEL, 0.0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, report = type(built).from_pretrained(
            path,
            config=built.config,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # and told below, by name
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "conversion" not in str(error):
            raise  # out of memory, perhaps
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise
        raise CheckpointError(
            f"the weights cannot be read ({type(error).__name__}). Remedy: download the checkpoint again."
        ) from error
    for what, found in (
        ("is in none of the weight files", report["missing_keys"]),
        ("has another shape than config.json asks for", report["mismatched_keys"]),
        ("cannot be used", report["error_msgs"]),
    ):
        if found:
            first = min(str(one[0]) if isinstance(one, tuple) else str(one) for one in found)
            raise CheckpointError(
                f"tensor {first} {what} ({len(found)} such). Remedy: download the checkpoint again."
            )
    model.to(device).requires_grad_(requires_grad=False).eval()
    _own_memory(model)
    progress(LABEL, 1.0)
    return model


def _own_memory(model: Any) -> None:
    """Copy what lies in mapped files: it would be read from disk whenever the page cache is short."""
    for tensor in model.parameters():  # tied ones once
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
