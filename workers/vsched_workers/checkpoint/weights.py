"""Loading of one module's tensors from safetensors files.

A stage builds its module on the meta device, at no cost, and loads its tensors by the checkpoint's index: the encode
worker never touches the language model's weights, nor vice versa. Only safetensors is supported: older formats are
pickles, and loading one executes its code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vsched.errors import CheckpointError
from vsched.worker.contract import Progress
from vsched_workers.checkpoint.files import INDEX_FILE, SINGLE_FILE, read_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vsched_workers.parallel.slicing import Cut
    from vsched_workers.quantized.schemes import Scheme

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
COMPARED_ROWS = 4096
ReadTensor = Callable[[str], "torch.Tensor | None"]
"""Reads a tensor by its name; returns None if there is none."""
_VISION = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|image_\w+|mm_\w+|multi_modal_projector|connector|aligner)\."
)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Convert errors while a weight file is read to one that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(
            f"weight file {name} is missing. Remedy: download the checkpoint again."
        ) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"weight file {name} is corrupt or cannot be read ({type(error).__name__}). "
            "Remedy: download the file again."
        ) from error


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """The files of a checkpoint by tensor.

    Attributes:
        tied: Whether output projection and embedding are one tensor, which may be stored under either name.
    """

    directory: Path
    files: dict[str, str]
    tied: bool = False

    @classmethod
    def open(cls, directory: Path, *, tied: bool = False) -> WeightIndex:
        """Read the index, or the header of the only file.

        Raises:
            CheckpointError: When there are no safetensors weights, or a file in the index is missing.
        """
        if (directory / INDEX_FILE).is_file():
            return cls(directory, _read_index(directory), tied)
        if not (directory / SINGLE_FILE).is_file():
            pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
            found = (
                "only pickled weights (.bin, .pt), which are never loaded" if pickled else "none"
            )
            raise CheckpointError(
                f"no safetensors weights ({SINGLE_FILE} or {INDEX_FILE}): found {found}. Remedy: "
                + (
                    "convert the checkpoint to safetensors."
                    if pickled
                    else "give the directory of a complete checkpoint."
                )
            )
        from safetensors import safe_open

        with _reading(SINGLE_FILE), safe_open(directory / SINGLE_FILE, framework="numpy") as file:
            return cls(directory, dict.fromkeys(file.keys(), SINGLE_FILE), tied)

    def find(self, name: str, prefixes: tuple[str, ...]) -> str | None:
        """Return the full name of a module's tensor, with the first prefix that has it."""
        found = next((prefix + name for prefix in prefixes if prefix + name in self.files), None)
        if found is None and self.tied and name == EMBEDDING and HEAD in self.files:
            return HEAD
        return found

    @contextmanager
    def opened(self) -> Iterator[ReadTensor]:
        """Return a function that reads a tensor, None if there is none; each file is opened once."""
        from safetensors import safe_open

        with ExitStack() as stack:
            files: dict[str, Any] = {}

            def read(name: str) -> torch.Tensor | None:
                file_name = self.files.get(name)
                if file_name is None:
                    return None
                with _reading(file_name):
                    if file_name not in files:
                        file = safe_open(self.directory / file_name, framework="pt", device="cpu")
                        files[file_name] = stack.enter_context(file)
                    tensor: torch.Tensor = files[file_name].get_tensor(name)
                return tensor

            yield read

    def check_unquantized(self, names: Iterable[str]) -> None:
        """Check that tensors, by their full names, are stored without scales: otherwise they hold other numbers.

        Raises:
            CheckpointError: When one is quantized.
        """
        for name in names:
            packed = name.removesuffix("weight") + "qweight"
            ends = ("scale", "scale_inv", "packed", "values")
            beside = (packed, *(f"{name}_{end}" for end in ends))
            if any(each in self.files for each in beside):
                raise CheckpointError(
                    f"tensor {name} is quantized; only linear layers of the language model may be, as "
                    "quantization_config says. Remedy: serve a checkpoint in which it is not quantized."
                )


def weight_files(directory: Path) -> list[Path]:
    """Return the existing weight files of a checkpoint, without other safetensors files next to them."""
    try:
        named = read_json(directory, INDEX_FILE).get("weight_map")
    except CheckpointError:
        named = None
    names = set(map(str, named.values())) if isinstance(named, dict) else {SINGLE_FILE}
    return [file for file in sorted(directory.glob("*.safetensors")) if file.name in names]


def tensor_headers(
    files: Iterable[Path], *, skip_corrupt: bool = False
) -> Iterator[tuple[str, Sequence[int], str]]:
    """Yield name, shape and type of every tensor, from the headers of the files.

    Raises:
        CheckpointError: When a file is corrupt, without `skip_corrupt`.
    """
    from safetensors import safe_open

    for file in files:
        try:
            with _reading(file.name), safe_open(file, framework="numpy") as content:
                for name in content.keys():  # noqa: SIM118 - it is no mapping
                    part = content.get_slice(name)
                    yield name, part.get_shape(), str(part.get_dtype())
        except CheckpointError:
            if not skip_corrupt:
                raise


def is_vision(name: str) -> bool:
    """Return True if a tensor of this name is part of the vision tower."""
    return _VISION.search(name) is not None


def _read_index(directory: Path) -> dict[str, str]:
    files = read_json(directory, INDEX_FILE).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{INDEX_FILE} has no weight_map. Remedy: download the file again.")
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise CheckpointError(
                f"{INDEX_FILE} names a file outside the checkpoint. Remedy: do not use it."
            )
        if not (directory / name).is_file():
            raise CheckpointError(
                f"weight file {name}, named by {INDEX_FILE}, is missing. "
                "Remedy: download the checkpoint again."
            )
    return files


def load_tensors(
    index: WeightIndex,
    wanted: dict[str, tuple[str, tuple[int, ...]]],
    *,
    dtype: torch.dtype,
    device: str,
    report: Callable[[float], None],
    cuts: Mapping[str, Cut] | None = None,
    flips: Sequence[str] = (),
    mapped: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Read tensors: `wanted` maps a key to the tensor's full name and its expected shape.

    For a key in `cuts`, that shape is of the part to be read, and only that part is read. Tensors with a key that
    matches one of `flips` may have their last two dimensions swapped in the file.

    Each file is opened once. The tensors own their memory: a view of the mapped file would be read from disk whenever
    the page cache is short, and would change if the file were replaced. Tensors with `mapped` keys may be such views,
    as they are copied soon.

    Raises:
        CheckpointError: When a file is corrupt or a tensor has another shape.
    """
    from safetensors import safe_open

    index.check_unquantized(name for name, _ in wanted.values())
    loaded: dict[str, torch.Tensor] = {}
    by_file: dict[str, list[str]] = {}
    for key, (name, _) in wanted.items():
        by_file.setdefault(index.files[name], []).append(key)
    with ExitStack() as stack:
        for file_name, keys in by_file.items():
            with _reading(file_name):
                file: Any = stack.enter_context(
                    safe_open(index.directory / file_name, framework="pt", device="cpu")
                )
            for key in keys:
                name, shape = wanted[key]
                cut = (cuts or {}).get(key)
                whole = shape if cut is None else cut.shape_before(shape)
                with _reading(file_name):
                    source = file.get_slice(name)
                    found = tuple(source.get_shape())
                flipped = (*whole[:-2], *whole[:-3:-1])
                flip = found == flipped != whole and any(fnmatchcase(key, each) for each in flips)
                if found != whole and not flip:
                    raise CheckpointError(
                        f"tensor {name} in {file_name} has shape {list(found)}, "
                        f"config.json asks for {list(whole)}. Remedy: use the config.json that "
                        "belongs to these weights."
                    )
                with _reading(file_name):
                    tensor = file.get_tensor(name) if cut is None else cut.read(source)
                tensor = tensor.transpose(-1, -2) if flip else tensor
                assert tuple(tensor.shape) == shape, f"{name} was cut to {tuple(tensor.shape)}"
                loaded[key] = tensor.to(device=device, dtype=dtype, copy=key not in mapped)
                loaded[key] = loaded[key].contiguous()
                report(len(loaded) / len(wanted))
    return loaded


def fill_module(
    module: nn.Module,
    index: WeightIndex,
    prefixes: tuple[str, ...],
    *,
    dtype: torch.dtype,
    device: str,
    label: str,
    progress: Progress,
    cuts: Mapping[str, Cut] | None = None,
    flips: Sequence[str] = (),
    mapped: Collection[str] = (),
    scheme: Scheme | None = None,
) -> None:
    """Load the weights of a module that was built on the meta device.

    For a tensor in `cuts`, the module has, and gets, only that part of it. Tensors in `mapped` may stay in the mapped
    files.

    Raises:
        CheckpointError: When a tensor is missing or of another shape, or a file is corrupt.
    """
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in module.state_dict().items():
        full = index.find(name, prefixes)
        if full is None:
            index.check_unquantized(prefix + name for prefix in prefixes)
            raise CheckpointError(
                f"tensor {prefixes[0]}{name} is in none of the weight files. "
                "Remedy: download the checkpoint again."
            )
        wanted[name] = (full, tuple(tensor.shape))
    loaded = load_tensors(
        index,
        wanted,
        dtype=dtype,
        device=device,
        report=lambda fraction: progress(label, fraction),
        cuts=cuts,
        flips=flips,
        mapped=mapped,
    )
    if scheme is not None:
        _fill_quantized(module, index, prefixes, scheme, dtype, cuts or {})
    module.load_state_dict(loaded, strict=True, assign=True)
    _make_buffers(module, device)
    module.requires_grad_(requires_grad=False)
    module.eval()


def _fill_quantized(
    module: nn.Module,
    index: WeightIndex,
    prefixes: tuple[str, ...],
    scheme: Scheme,
    dtype: torch.dtype,
    cuts: Mapping[str, Cut],
) -> None:
    """Read the quantized weights of layers, one after the other."""
    from vsched_workers.quantized.layers import QuantizedLinear
    from vsched_workers.quantized.published import read_quantized

    with index.opened() as read:
        for name, child in module.named_modules():
            if not isinstance(child, QuantizedLinear):
                continue

            def of_layer(end: str, name: str = name) -> torch.Tensor | None:
                full = index.find(f"{name}.{end}", prefixes)
                return None if full is None else read(full)

            shape = child.out_features, child.in_features
            cut = cuts.get(f"{name}.weight")
            whole = shape if cut is None else cut.shape_before(shape)
            made = read_quantized(scheme, of_layer, (whole[0], whole[1]), dtype, name=name)
            child.quantized = made.owned() if cut is None else made.part(cut)


def _make_buffers(module: nn.Module, device: str) -> None:
    """Initialize buffers that no checkpoint contains (rotary frequencies) and that have no values as built."""
    import torch

    for child in module.modules():
        buffers = dict(child.named_buffers(recurse=False))
        if not any(buffer.is_meta for buffer in buffers.values()):
            continue
        if not hasattr(child, "config"):  # an embedding that is multiplied by a number
            for name in buffers:
                setattr(child, name, torch.tensor(getattr(child, f"scalar_{name}"), device=device))
            continue
        fresh: Any = type(child)(child.config)
        for name, buffer in fresh.named_buffers(recurse=False):
            setattr(child, name, buffer.to(device))


def load_head(
    model: Any,
    index: WeightIndex,
    *,
    dtype: torch.dtype,
    device: str,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Return the output projection [vocabulary, hidden]: the embedding itself, or a view of it, if the two are tied.

    A checkpoint that ties them but contains two different tensors gets both, as in transformers. `cut` is the wanted
    part of the vocabulary.

    Raises:
        CheckpointError: When it is neither tied nor in the checkpoint.
    """
    embedding: torch.Tensor = model.embed_tokens.weight
    if index.tied and not _differs(index, embedding):
        return embedding if cut is None else cut.read(embedding)
    name = HEAD
    index.check_unquantized([name])
    if name not in index.files:
        raise CheckpointError(
            f"tensor {name} is in none of the weight files, and config.json does not tie it to the embedding. "
            "Remedy: download the checkpoint again."
        )
    rows = len(embedding) if cut is None else cut.size
    return load_tensors(
        index,
        {name: (name, (rows, embedding.shape[1]))},
        dtype=dtype,
        device=device,
        report=lambda _: None,
        cuts=None if cut is None else {name: cut},
    )[name]


def _differs(index: WeightIndex, embedding: torch.Tensor) -> bool:
    """Return whether there is an output projection that differs from the embedding; compares a few rows at a time."""
    import torch
    from safetensors import safe_open

    name = index.files.get(HEAD)
    if name is None:
        return False
    with _reading(name), safe_open(index.directory / name, framework="pt", device="cpu") as file:
        head: Any = file.get_slice(HEAD)
        if tuple(head.get_shape()) != tuple(embedding.shape):
            return True
        for start in range(0, len(embedding), COMPARED_ROWS):
            rows = head[start : start + COMPARED_ROWS].to(embedding)
            if not torch.equal(rows, embedding[start : start + COMPARED_ROWS]):
                return True
    return False
