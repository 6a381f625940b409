"""The library for a checkpoint's image processing: Pillow with numpy wherever transformers can, else torchvision.

Nothing here imports transformers: a process without torch hides torch before that import (`forgo_torch`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vsched.errors import CheckpointError
from vsched_workers.checkpoint.files import read_json

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files that may name the image processor's class: the newer layout, within `image_processor`, and the older."""

EXTRA = "pip install 'vsched[torchvision]'"


def forgo_torch(directory: Path) -> None:
    """Hide torch from transformers, which imports it even for tokenizers: that takes three seconds and 250 MB.

    If torchvision processes the images of this checkpoint, torch is kept, with one thread: images are processed in
    several threads already.
    """
    if "torch" in sys.modules:
        return
    if has_torchvision() and not on_pillow(directory):
        import torch

        torch.set_num_threads(1)
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it raises ImportError
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def has_torchvision() -> bool:
    """Return whether torchvision is installed."""
    return importlib.util.find_spec("torchvision") is not None


def on_pillow(directory: Path) -> bool:
    """Return whether transformers has an image processor for the checkpoint that does without torchvision."""
    newer, older = (
        read_json(directory, name) if (directory / name).is_file() else {}
        for name in PROCESSOR_FILES
    )
    stated = newer.get("image_processor")
    stated = stated if isinstance(stated, dict) else older
    name = str(stated.get("image_processor_type", "")).removesuffix("Fast")
    known = _image_processors()
    kinds = [kind for kind in known.values() if kind and name in kind.values()]
    family = read_json(directory, "config.json").get("model_type", "")
    kinds = kinds or [kind for kind in (known.get(family),) if kind]
    return not kinds or any("pil" in kind for kind in kinds)


def needs_torchvision(family: str) -> CheckpointError:
    """Return the error that only torchvision can process a model's images, and is not installed."""
    return CheckpointError(
        f"config.json: model_type {family!r} has an image processor that transformers has for torchvision alone, which "
        f"is not installed. Remedy: {EXTRA}; it brings torch into the engine's process, three seconds and 250 MB."
    )


@cache
def _image_processors() -> Mapping[str, Mapping[str, str]]:
    """Return the classes of transformers' image processors by library, by `model_type`.

    The file is a table without imports; importing its package would look for torch.
    """
    package = importlib.util.find_spec("transformers")
    assert package is not None, "vsched-workers depends on it"
    assert package.origin is not None, "it is a folder with an __init__.py"
    path = Path(package.origin).with_name("models") / "auto" / "auto_mappings.py"
    spec = importlib.util.spec_from_file_location("vsched_image_processors", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Mapping[str, Mapping[str, str]] = module.IMAGE_PROCESSOR_MAPPING_NAMES
    return found
