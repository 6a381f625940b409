"""Conversion of a GGUF file to a checkpoint with its quantized weights unchanged.

Only transformers has the mapping of tensor names and the order of rows, which it permutes in some projections. So the
file is read once more with transformers, with the numbers of tensors and rows in place of their values. If a result
consists of whole rows of one tensor, its blocks are written in that order, after a comparison with the weight that
transformers dequantized from the same tensor.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vsched_workers.quantized.gguf_blocks import READERS, Levels, read_blocks
from vsched_workers.quantized.schemes import GGUF_TENSORS

_TENSOR = float(1 << 32)
"""Numbers of tensors are multiples of this, plus the number of a row: float64 represents both."""


def write_levels(source: Path, folder: Path, model: Any) -> int:
    """Write the weights of a loaded model and its configuration; return the number of quantized weights."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    from vsched_workers.quantized.weights import packed_int4

    tensors = list(GGUFReader(source).tensors)
    places = _places(source, model, tensors)
    linears = {
        f"{name}.weight" for name, each in model.named_modules() if type(each) is torch.nn.Linear
    }
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    written: dict[str, Any] = {}
    kept = 0
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        levels = None
        if name in places and name in linears and name != "lm_head.weight":
            levels = _levels(places[name], tensors, weight)
        if levels is None:
            written[name] = weight.contiguous()
            continue
        kept += 1
        end, scale, offset = (f"{name.removesuffix('weight')}{each}" for each in GGUF_TENSORS)
        values = torch.from_numpy(levels.values)
        written[end] = values if values.dtype == torch.int8 else packed_int4(values)
        written[scale] = torch.from_numpy(levels.scales)
        if levels.offsets is not None:
            written[offset] = torch.from_numpy(levels.offsets)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if kept:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gguf"}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return kept


def _places(source: Path, model: Any, tensors: list[Any]) -> dict[str, npt.NDArray[np.float64]]:
    """Return, for each tensor of the model, the numbers of the file's tensor and rows, as arranged in it."""
    import gguf
    import torch

    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    library: Any = gguf
    numbers = iter(range(len(tensors)))
    real, bar = library.dequantize, reader.tqdm

    def numbered(data: Any, kind: Any) -> Any:
        number = next(numbers)
        shape = tuple(int(size) for size in reversed(tensors[number].shape))
        if len(shape) != 2 or kind.name not in READERS:
            return real(data, kind)
        rows = number * _TENSOR + np.arange(shape[0], dtype=np.float64)
        return np.broadcast_to(rows[:, None], shape)

    library.dequantize, reader.tqdm = numbered, lambda held, **_: held
    try:
        with torch.device("meta"):
            empty = type(model)(model.config)
        found = reader.load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=empty)
    finally:
        library.dequantize, reader.tqdm = real, bar
    return {
        name: tensor.numpy()
        for name, tensor in found["tensors"].items()
        if tensor.dtype == torch.float64 and tensor.dim() == 2
    }


def _levels(places: npt.NDArray[np.float64], tensors: list[Any], weight: Any) -> Levels | None:
    """Return a weight's quantized values from the numbers of its rows; None if it is not whole rows of a tensor."""
    import torch

    first = places[:, :1]
    number = int(first[0, 0] // _TENSOR)
    rows = first[:, 0] - number * _TENSOR
    if (places != first).any() or not 0 <= rows.min() <= rows.max() < len(tensors[number].data):
        return None
    order = rows.astype(np.int64)
    if (order != rows).any() or places.shape != tuple(weight.shape):
        return None
    tensor = tensors[number]
    found = read_blocks(tensor.tensor_type.name, np.ascontiguousarray(tensor.data[order]))
    exact = torch.from_numpy(dequantized(found)).to(weight.dtype)
    return found if torch.allclose(exact.float(), weight.float(), rtol=2**-7, atol=1e-6) else None


def dequantized(levels: Levels) -> npt.NDArray[np.float32]:
    """Return the dequantized values, [out, in]."""
    centre = 8 if levels.values.dtype == np.uint8 else 0
    group = levels.values.shape[1] // levels.scales.shape[1]
    values = levels.values.astype(np.float32) - np.float32(centre)
    values *= levels.scales.repeat(group, 1)
    return values if levels.offsets is None else values + levels.offsets.repeat(group, 1)
