"""Loading of whole or partial models of any architecture, with transformers' own loading.

Transformers knows all former names of an architecture's tensors, experts in separate tensors, and tied weights. Its
warnings are errors here: a missing tensor would be random.
"""

from __future__ import annotations

import errno
import functools
import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from vsched.errors import CheckpointError
from vsched.worker.contract import Progress
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.families.generic import build_model, refusal, text_config, vision_facts

if TYPE_CHECKING:
    import torch

    from vsched_workers.checkpoint.quantized_parts import QuantizedParts

LABEL = "loading the language model"


def build_whole(path: str, family: str, dtype: torch.dtype) -> Any:
    """Return a model without weights, on the meta device; `dtype` is its data type when loaded.

    Raises:
        CheckpointError: When it cannot run on paged attention.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = text_config(checkpoint_directory(path), family)
    with torch.device("meta"):
        return build_model(AutoModelForCausalLM, config, family, dtype=dtype)


def build_tower(path: str, family: str) -> Any:
    """Return a vision-language model without its language model and without weights, on the meta device.

    Raises:
        CheckpointError: When it has no image features, or its vision tower alone cannot compute them.
    """
    import torch

    whole = _vision_language_class(path, family)
    with torch.device("meta"):
        return part_of(type(whole), _drop_language)(whole.config)


def build_without_tower(path: str, family: str, dtype: torch.dtype) -> Any:
    """Return a vision-language model without its image encoder and without weights, on the meta device.

    Raises:
        CheckpointError: When the model does not accept image features.
    """
    import torch
    from transformers.utils import logging

    whole = _vision_language_class(path, family)
    if "mm_encoder_outputs" not in inspect.signature(type(whole).forward).parameters:
        raise refusal(family, "no input for image features")
    logging.set_verbosity_error()  # it warns about the missing part
    whole.config.dtype = dtype
    with torch.device("meta"):
        return part_of(type(whole), _drop_all_but_language)(whole.config).to(dtype)


def _vision_language_class(path: str, family: str) -> Any:
    """Return the whole model, on the meta device, for its class and configuration."""
    import torch
    from transformers import AutoModelForImageTextToText

    facts = vision_facts(checkpoint_directory(path), family)
    try:
        with torch.device("meta"):
            whole = build_model(AutoModelForImageTextToText, facts.config, family)
    except ImportError as error:
        raise refusal(
            family, f"modules of a package that is not installed ({error.name})"
        ) from error
    if not hasattr(whole, "get_image_features") and not hasattr(
        getattr(whole, "model", None), "get_image_features"
    ):
        raise refusal(family, "no features of images that the language model could be given")
    return whole


def part_of(whole: Any, drop: Callable[[Any], None]) -> Any:
    """Return the class of a model without the parts that `drop` removes: transformers does not load their weights."""

    def build(self: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, *arguments, **options)
        drop(self)
        left = dict(self.named_parameters(remove_duplicate=False))
        tied = self.all_tied_weights_keys
        self.all_tied_weights_keys = {
            one: other for one, other in tied.items() if one in left and other in left
        }

    # The same name, by which transformers finds renamed and converted tensors.
    return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})


def _drop_language(model: Any) -> None:
    from torch import nn

    gone = (model.get_decoder(), model.get_output_embeddings())
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if any(child is each for each in gone):
                setattr(parent, name, nn.Identity())


def _drop_all_but_language(model: Any) -> None:
    from torch import nn

    parts = (model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings())
    kept = {each for part in parts if part is not None for each in part.modules()}
    for parent in list(model.modules()):
        if parent in kept:
            continue
        for name, child in list(parent.named_children()):
            if kept.isdisjoint(child.modules()):
                setattr(parent, name, nn.Identity())


def left_out(model: Any) -> list[str]:
    """Return the names of the parts that a partial model lacks."""
    from torch import nn

    return [name for name, module in model.named_modules() if isinstance(module, nn.Identity)]


def load_whole(
    built: Any,
    path: str,
    *,
    dtype: torch.dtype,
    device: str,
    progress: Progress,
    attention: str | None = None,
    label: str = LABEL,
    share: Callable[[Any], None] | None = None,
    mapped: Callable[[Any], Collection[str]] | None = None,
    quantized: QuantizedParts | None = None,
) -> Any:
    """Return the model with its weights; `built` is the result of `build_whole`, or another function here.

    `share` reduces it to a rank's share before anything is copied from mapped files. `mapped` returns the parameters of
    the model that may stay there, as they are copied soon. `quantized` are its quantized weights.

    Raises:
        CheckpointError: When tensors are missing or of another shape, or a file cannot be read.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    progress(label, 0.0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = type(built) if quantized is None else part_of(type(built), quantized.remove_from)
    try:
        model, report = kind.from_pretrained(
            path,
            config=built.config,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below by name
        )
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        cause = error.__context__
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            raise MemoryError from error  # transformers reports an error about a conversion instead
        if isinstance(error, RuntimeError) and "conversion" not in str(error):
            raise  # possibly out of memory
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
    if share is not None:
        share(model)
    model.to(device).requires_grad_(requires_grad=False).eval()
    _own_memory(model, () if mapped is None else mapped(model))
    if quantized is not None:
        quantized.read_into(model, dtype, device, functools.partial(progress, label))
    progress(label, 1.0)
    return model


def _own_memory(model: Any, mapped: Collection[str]) -> None:
    """Copy tensors in mapped files: they would be read from disk whenever the page cache is short."""
    left = {*mapped}
    own = {
        tensor: None  # each once: tied tensors have several names, some of which may be in `left`
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if tensor.device.type == "cpu" and name not in left
    }
    for tensor in own:
        tensor.data = tensor.data.clone()
    for module in model.modules():  # a buffer is a view, which would keep its base in the file
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.clone())
