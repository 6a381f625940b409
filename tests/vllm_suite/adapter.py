"""A replacement for the adapters that vLLM's tests download: for the given checkpoint, with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

RANK = 8
PROJECTION = "q_proj"


def make(folder: Path, checkpoint: Path) -> Path:
    """Write an adapter of the attention of a checkpoint's language model, as PEFT would save it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
    config |= {"target_modules": [PROJECTION], "lora_dropout": 0.0, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                if name.endswith(f".{PROJECTION}.weight") and "visual" not in name:
                    outputs, inputs = weights.get_slice(name).get_shape()
                    module = f"base_model.model.{name.removesuffix('.weight')}"
                    for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                        values = 0.02 * noise.standard_normal(shape, np.float32)
                        tensors[f"{module}.lora_{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
