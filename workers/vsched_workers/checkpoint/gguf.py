"""Conversion of a GGUF file to a checkpoint: safetensors, tokenizer, chat template and generation settings.

Transformers reads the file and dequantizes it, unless quantized weights are kept. Additions here are SmolLM's
pre-tokenizer, the EOS token in the generation settings, and a tokenizer class that does not change its rules on
loading.

Only transformers has the mapping of tensor names and the order of rows, which it permutes in some projections. So to
keep quantized weights unchanged, the file is read once more with transformers, with the numbers of tensors and rows in
place of their values. If a result consists of whole rows of one tensor, its blocks are written in that order, after a
comparison with the weight that transformers dequantized from the same tensor. Blocks become values, scales and offsets,
exact except for the sum of two offsets. With nibbles and pairs of bits in the order of llama.cpp's ggml:

    Q8_0   32 values   d, 32 x int8                                   d q
    Q4_0   32 values   d, 32 x 4 bits                                 d (q - 8)
    Q4_1   32 values   d, m, 32 x 4 bits                              d q + m
    Q4_K  256 values   d, e, 8 x (s, t) of 6 bits, 256 x 4 bits       d s q - e t      of 32 values each
    Q6_K  256 values   256 x 6 bits, 16 x s of int8, d                d s (q - 32)     of 16 values each

d, m and e are float16. 4-bit values stay 4-bit; 6-bit values are stored in 8 bits.

Rejected: serving GGUF files directly, which takes 30 s of conversion at each start of a rank and the memory of both
forms; a reader of our own, since transformers and `gguf` are maintained.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vsched.errors import CheckpointError
from vsched.worker.contract import Progress
from vsched_workers.checkpoint.facts import DTYPES
from vsched_workers.checkpoint.files import check_new, new_checkpoint, without_bars
from vsched_workers.quantized.schemes import GGUF_TENSORS

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CENTRE = 8
"""The zero point of 4-bit values in memory."""


class Levels(NamedTuple):
    """A quantized weight [out, in].

    Attributes:
        values: int8 [out, in], or 4-bit values with a zero point of 8, as uint8 [out, in].
        scales: [out, groups], for groups of equal size.
        offsets: As scales; None without offsets.
    """

    values: npt.NDArray[Any]
    scales: Floats
    offsets: Floats | None = None


def _half(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at a position of each block, [out, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(octets: Bytes) -> Bytes:
    """Return 4-bit values: the low nibbles of all bytes, then the high ones."""
    return np.concatenate((octets & 15, octets >> 4), axis=-1)


def _q8_0(blocks: Bytes) -> Levels:
    return Levels(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0))


def _q4_0(blocks: Bytes) -> Levels:
    return Levels(_nibbles(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Levels:
    scales = _half(blocks, 0)
    return Levels(_nibbles(blocks[..., 4:]), scales, _half(blocks, 2) + CENTRE * scales)


def _q4_k(blocks: Bytes) -> Levels:
    packed = blocks[..., 4:16]
    low, high, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((low & 63, last & 15 | low >> 6 << 4), axis=-1)
    minima = np.concatenate((high & 63, last >> 4 | high >> 6 << 4), axis=-1)
    exact = _half(blocks, 0) * scales
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Levels(values, exact, CENTRE * exact - _half(blocks, 2) * minima)


def _q6_k(blocks: Bytes) -> Levels:
    shape = blocks.shape[:2]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64))
    pairs = blocks[..., 128:192].reshape(*shape, 2, 32)
    high = np.concatenate([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    values = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return Levels(values, _half(blocks, 208) * scales)


READERS: Mapping[str, tuple[int, Callable[[Bytes], Levels]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
"""Formats by name: the bytes of a block, and the reader of blocks [out, blocks, bytes]."""


def read_blocks(name: str, rows: Bytes) -> Levels:
    """Return the quantized values in a tensor's rows, [out, bytes], of the format with this name."""
    size, read = READERS[name]
    found = read(rows.reshape(len(rows), -1, size))
    grids = (None if each is None else each.reshape(len(rows), -1) for each in found[1:])
    scales, offsets = grids
    assert scales is not None, "every format has scales"
    return Levels(found.values.reshape(len(rows), -1), scales, offsets)


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


PACKAGES = ("gguf", "accelerate")
"""Packages that transformers needs for GGUF files in addition to its dependencies."""
_GPT2_SPLITS = ("gpt-2", "default")
_SMOLLM_SPLIT = "smollm"


def check_conversion(path: str, *, dtype: str) -> None:
    """Check the requirements of a conversion before a GGUF file exists.

    Raises:
        CheckpointError: When a package is missing, the type is unknown, or `path` exists.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"unknown data type {dtype!r}. Known: {', '.join(DTYPES)}.")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"reading a GGUF file needs {' and '.join(missing)}. Remedy: pip install 'vsched[convert]'"
        )
    check_new(path)


def convert_gguf(
    file: str, path: str, *, dtype: str, progress: Progress, keeps_levels: bool = False
) -> int:
    """Write the checkpoint of a GGUF file to a directory; return its number of parameters.

    `keeps_levels` keeps the quantized weights of linear layers, if their format is supported.

    Raises:
        CheckpointError: When the file cannot be read or converted, or the directory cannot be written.
    """
    check_conversion(path, dtype=dtype)
    source = Path(file)
    if not source.is_file():
        raise CheckpointError(f"{source.name!r} is no file. Remedy: give the path of a GGUF file.")
    with new_checkpoint(path) as folder:
        progress("reading the tokenizer", 0.0)
        with _reading(source):
            tokenizer = _tokenizer(source)
        tokenizer.save_pretrained(folder)
        with _reading(source):
            model = _model(source, dtype, progress)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        progress("writing the weights", 0.0)
        with without_bars():
            if keeps_levels:
                write_levels(source, folder, model)
            else:
                model.save_pretrained(folder)
        return sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Transformers parses an arbitrary file here: every exception means that it cannot be converted.
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{source.name!r} cannot be converted: {first} "
            "Remedy: convert a GGUF file of an architecture that transformers reads."
        ) from error


def _tokenizer(source: Path) -> Any:
    """Return the file's tokenizer, which splits words as the model's own does."""
    import transformers

    read: Any = transformers.AutoTokenizer.from_pretrained(
        str(source.parent), gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    backend = read.backend_tokenizer
    _mend_split(backend, source)
    make: Any = (
        transformers.PreTrainedTokenizerFast
    )  # the model's own class would split by other rules
    special = {name: value for name, value in read.special_tokens_map.items() if value}
    tokenizer = make(tokenizer_object=backend, **special)
    tokenizer.chat_template = read.chat_template
    return tokenizer


def _mend_split(backend: Any, source: Path) -> None:
    """Correct the pre-tokenizer if transformers does not know the file's name for it and used GPT-2's."""
    from tokenizers import pre_tokenizers

    if type(backend.pre_tokenizer) is not pre_tokenizers.ByteLevel:
        return  # transformers knew it, or the tokenizer does not split
    name = _field(source, "tokenizer.ggml.pre") or "default"
    if name == _SMOLLM_SPLIT:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif name not in _GPT2_SPLITS:
        raise CheckpointError(
            f"{source.name!r} splits words by the rule {name!r}, which transformers does not know: "
            "its tokens would differ from those in training. "
            "Remedy: get the model as safetensors, with its tokenizer.json."
        )


def _field(source: Path, name: str) -> str:
    from gguf import GGUFReader

    field = GGUFReader(source).get_field(name)
    return str(field.contents()) if field is not None else ""


def _model(source: Path, dtype: str, progress: Progress) -> Any:
    import torch
    import transformers

    def counted(tensors: Iterable[Any], **_: object) -> Iterator[Any]:
        """Replace the progress bar of transformers."""
        held = list(tensors)
        for index, tensor in enumerate(held):
            progress("undoing the quantisation", index / len(held))
            yield tensor

    library: Any = transformers
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar, reader.tqdm = reader.tqdm, counted
    try:
        with without_bars():
            model, loaded = library.AutoModelForCausalLM.from_pretrained(
                str(source.parent),
                gguf_file=source.name,
                dtype=getattr(torch, dtype),
                quantization_config=library.GgufConfig(dequantize=True),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    finally:
        reader.tqdm = bar
    if missing := sorted(loaded["missing_keys"]):
        # Transformers has given them random values.
        raise CheckpointError(
            f"{source.name!r} lacks {len(missing)} weights of the model, the first is {missing[0]}. Remedy: get the "
            "whole file, or the model as safetensors."
        )
    return model
