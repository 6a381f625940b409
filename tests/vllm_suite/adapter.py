"""A replacement for the adapters that vLLM's tests download: for the given checkpoint, with random weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

RANK = 8
PROJECTION = "q_proj"


def make(folder: Path, checkpoint: Path) -> Path:
    """Write an adapter of the attention of a checkpoint's language model, as PEFT would save it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
    config |= {"target_modules": [PROJECTION], "lora_dropout": 0.0, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(0)
    header: dict[str, object] = {}
    data = b""
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, (outputs, inputs) in _projections(file).items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                values = 0.02 * noise.standard_normal(shape, np.float32)
                offsets = [len(data), len(data) + values.nbytes]
                header[f"{module}.lora_{part}.weight"] = {
                    "dtype": "F32",
                    "shape": shape,
                    "data_offsets": offsets,
                }
                data += values.tobytes()
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    return folder


def _projections(file: Path) -> dict[str, list[int]]:
    """Return the shapes of the adapted matrices, from the head of a safetensors file."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(size))
    return {
        name: entry["shape"]
        for name, entry in header.items()
        if name.endswith(f".{PROJECTION}.weight") and "visual" not in name
    }
