"""Writes float32 checkpoints with dequantized weights, for comparison with quantization on loading."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vsched_workers.quantized.weights import quantize

EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight", "wte.weight")


def as_quantized(name: str, tensor: torch.Tensor, kind: str, group: int) -> torch.Tensor:
    """Return a checkpoint's tensor after quantization and dequantization."""
    if tensor.dim() != 2 or "pos_embed" in name:
        return tensor
    if name.endswith(EMBEDDINGS):
        kind, group = "int8", group if kind == "int8" else 0
    return quantize(tensor, kind, group=group).dequantized()


def dequantized_twin(source: Path, target: Path, dtype: torch.dtype, kind: str, group: int) -> Path:
    """Write a float32 checkpoint with the dequantized weights of another."""
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        made = {
            name: as_quantized(name, tensor.to(dtype), kind, group).float().contiguous()
            for name, tensor in tensors.items()
        }
        save_file(made, file, metadata={"format": "pt"})
    return target
