"""Conversion of a GGUF file to a checkpoint: safetensors, tokenizer, chat template and generation settings.

Transformers reads the settings and the tokenizer, and names and rearranges the tensors, one at a time
(`gguf_weights.py`). Additions here are the quantized weights (`gguf_blocks.py`), SmolLM's pre-tokenizer, the end tokens
in the generation settings, a tokenizer class that does not change its rules on loading, the widths of experts, and the
scaling of rotary embeddings and of Gemma's attention scores.

Rejected: serving GGUF files directly, which takes 30 s of conversion at each start of a rank and the memory of both
forms; a reader of our own, since transformers and `gguf` are maintained.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vsched.checkpoints import parts_of
from vsched.errors import CheckpointError
from vsched.worker.contract import Progress
from vsched_workers.checkpoint.facts import DTYPES
from vsched_workers.checkpoint.files import ShardWriter, check_new, new_checkpoint
from vsched_workers.checkpoint.gguf_vision import (
    KINDS,
    fits,
    present_as_text_model,
    read_vision,
    whole_name,
)

if TYPE_CHECKING:
    from vsched_workers.checkpoint.gguf_weights import FileWeight

logger = logging.getLogger(__name__)

PACKAGES = ("gguf",)
"""Packages that transformers needs for GGUF files in addition to its dependencies."""
_GPT2_SPLITS = ("gpt-2", "default")
_SMOLLM_SPLIT = "smollm"
_LLAMA3_TENSOR = "rope_freqs.weight"
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
"""The scaling of all models of Llama 3.1 to 3.3, apart from its factor."""

_GEMMA_27B = {("gemma2", 46), ("gemma3_text", 62)}
"""Type and layers of the models whose attention scores are scaled by hidden size per head."""
_EXPERT_WIDTHS = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_END_S = 30.0
"""Maximum wait for an interrupted conversion."""
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>")


def check_conversion(path: str, *, dtype: str) -> None:
    """Check the requirements of a conversion before a GGUF file exists.

    Raises:
        CheckpointError: When a package is missing, the type is unknown, or `path` exists.
    """
    if dtype not in ("auto", *DTYPES):
        raise CheckpointError(f"unknown data type {dtype!r}. Known: auto, {', '.join(DTYPES)}.")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"reading a GGUF file needs {' and '.join(missing)}. Remedy: pip install 'vsched[convert]'"
        )
    check_new(path)


def convert_gguf(file: str, path: str, *, dtype: str, progress: Progress, mmproj: str = "") -> int:
    """Write the checkpoint of a GGUF file to a directory; return its number of parameters.

    `mmproj` is the file of its vision tower, of a family in `gguf_vision.KINDS`; without, it takes text only.

    With the type `auto`, quantized linear layers and experts stay quantized, and the rest is bfloat16; with any other
    type all weights have it.

    Raises:
        CheckpointError: When the file cannot be read or converted, or the directory cannot be written.
    """
    check_conversion(path, dtype=dtype)
    source = Path(file).with_name(parts_of(Path(file).name)[0])
    tower = open_gguf(Path(mmproj)) if mmproj else None
    with new_checkpoint(path) as folder:
        progress("reading the tokenizer", 0.0)
        with _read_once(source) as reader, _reading(source):
            architecture = _field(reader, "general.architecture")
            if architecture in KINDS:
                present_as_text_model(reader, architecture)
            tokenizer = _tokenizer(source, reader)
            model = _empty_model(source, reader, "bfloat16" if dtype == "auto" else dtype)
            weights = _file_weights(model, reader, source.name)
            _mend_rope(model.config, source.name, reader)
            _mend_scores(model.config)
            model.generation_config.eos_token_id = _end_tokens(tokenizer, reader)
        if tower is not None and not _fits(Path(mmproj), tower, architecture, model.config):
            tower = None
        shards, name_of = ShardWriter(folder), str if tower is None else whole_name
        for made, done in _converted(source, model, weights, quantized=dtype == "auto"):
            shards.add({name_of(name): each for name, each in made.items()})
            progress("converting the weights", done)
        count: int = sum(each.numel() for each in model.parameters())
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if tower is not None:
            progress("reading the vision tower", 0.0)
            with _reading(Path(mmproj)):
                words = tokenizer.get_vocab()
                vision = read_vision(tower, architecture, reader, model.config, words)
            count += sum(each.numel() for each in vision.weights.values())
            shards.add(vision.weights)
            vision.write(folder)
        progress("writing the files", 0.0)
        shards.finish()
        return count


def _fits(file: Path, tower: Any, architecture: str, config: Any) -> bool:
    """Return whether a tower belongs to a language model, with a warning if not."""
    with _reading(file):
        if fits(tower, architecture, config.hidden_size):
            return True
    logger.warning(
        "%s is not read: it is the vision part of another model, or of a family that is not supported",
        file.name,
    )
    return False


def open_gguf(file: Path) -> Any:
    """Return the reader of a GGUF file, with the tensors of all its parts and the settings of the first.

    Raises:
        CheckpointError: When there is none, or one is not whole.
    """
    from gguf import GGUFReader

    readers = []
    for part in (file.with_name(name) for name in parts_of(file.name)):
        if not part.is_file():
            raise CheckpointError(
                f"{part.name!r} is no file. Remedy: give the path of a GGUF file."
            )
        try:
            readers.append(GGUFReader(part))
        except Exception as error:  # of any type: it parses arbitrary bytes
            raise CheckpointError(
                f"{part.name!r} is not a whole GGUF file ({error}). Remedy: download it again."
            ) from error
    first, *others = readers
    first.tensors.extend(tensor for each in others for tensor in each.tensors)
    return first


class _Message(msgspec.Struct, frozen=True):
    """A line of a converting process: progress, or its end."""

    label: str = ""
    fraction: float = 0.0
    parameters: int = 0
    error: str = ""


def convert_in_child(
    file: str, path: str, *, dtype: str, progress: Progress, mmproj: str = ""
) -> int:
    """Run `convert_gguf` in a process of its own: an engine would keep the memory of torch and the weights.

    Raises:
        CheckpointError: As by `convert_gguf`, or when the process ends otherwise.
    """
    check_conversion(path, dtype=dtype)
    command = [sys.executable, "-P", "-m", __name__, file, path, dtype, mmproj]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    last = _Message()
    with subprocess.Popen(  # noqa: S603 - no shell
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # one signal, from here, ends it, not the terminal's as well
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                last = msgspec.json.decode(line, type=_Message)
                if last.label:
                    progress(last.label, last.fraction)
        except BaseException:
            child.terminate()  # it removes its temporary folder
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
            child.kill()
            raise
    if last.error:
        raise CheckpointError(last.error)
    if not last.parameters:
        killed = child.returncode == -signal.SIGKILL
        remedy = "free memory" if killed else "see its output"
        raise CheckpointError(
            f"{Path(file).name!r} cannot be converted: the process ended with status {child.returncode}. "
            f"Remedy: {remedy}."
        )
    return last.parameters


def _main(file: str, path: str, dtype: str, mmproj: str) -> None:
    def write(message: _Message) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()

    def progress(label: str, fraction: float) -> None:
        write(_Message(label, fraction))

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # or the parent has ended
        try:
            count = convert_gguf(file, path, dtype=dtype, progress=progress, mmproj=mmproj)
            write(_Message(parameters=count))
        except CheckpointError as error:
            write(_Message(error=str(error)))


def _empty_model(source: Path, reader: Any, dtype: str) -> Any:
    """Return the model of a file, on the meta device; transformers does not read the widths of experts."""
    import torch
    import transformers

    library: Any = transformers
    config = library.AutoConfig.from_pretrained(
        str(source.parent), gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    architecture = _field(reader, "general.architecture")
    for name, key in _EXPERT_WIDTHS.items():
        if hasattr(config, name) and (width := _field(reader, f"{architecture}.{key}")):
            setattr(config, name, int(width))
    with torch.device("meta"):
        return library.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def _file_weights(model: Any, reader: Any, file: str) -> list[FileWeight]:
    """Return the model's weights, without any that is tied to another one."""
    from vsched_workers.checkpoint.gguf_weights import file_weights

    weights = file_weights(model, reader)
    found = {each.name for each in weights}
    tied = {
        name for pair in model.all_tied_weights_keys.items() if found & {*pair} for name in pair
    }
    if missing := sorted(model.state_dict().keys() - found - tied):
        raise CheckpointError(
            f"{file!r} lacks {len(missing)} weights of the model, the first is {missing[0]}. Remedy: get the "
            "whole file, or the model as safetensors."
        )
    return weights


def _converted(
    source: Path, model: Any, weights: Sequence[FileWeight], *, quantized: bool
) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield the tensors of each weight in the checkpoint, and the share of the model that is done.

    With `quantized`, linear layers and experts keep the file's quantization, which is set in the model's config.
    """
    from vsched_workers.checkpoint.gguf_blocks import converted_weights, packed_weights

    packed = packed_weights(model, weights) if quantized else set()
    if packed:
        model.config.quantization_config = {"quant_method": "gguf"}
    total, done = sum(each.target.numel() for each in weights), 0
    with _reading(source):
        for weight, made in zip(weights, converted_weights(weights, packed), strict=True):
            done += weight.target.numel()
            yield made, done / total


@contextlib.contextmanager
def _read_once(source: Path) -> Iterator[Any]:
    """Return the reader of a file, which transformers uses instead of parsing the file three times more.

    It would also list the tensor names of an architecture once for each module of a model, and not find those in other
    parts of the file.
    """
    import gguf

    library: Any = gguf
    settings: Any = importlib.import_module("transformers.integrations.gguf")
    reader = open_gguf(source)
    names = tuple(tensor.name for tensor in reader.tensors)
    given = library.GGUFReader, library.get_tensor_name_map, settings.read_gguf_metadata
    library.GGUFReader = lambda _: reader
    library.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    settings.read_gguf_metadata = lambda file: (given[2](file)[0], names)
    try:
        yield reader
    finally:
        library.GGUFReader, library.get_tensor_name_map, settings.read_gguf_metadata = given


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


def _tokenizer(source: Path, reader: Any) -> Any:
    """Return the file's tokenizer, which splits words as the model's own does."""
    import transformers

    read: Any = transformers.AutoTokenizer.from_pretrained(
        str(source.parent), gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    backend = read.backend_tokenizer
    _mend_split(backend, source.name, reader)
    make: Any = (
        transformers.PreTrainedTokenizerFast
    )  # the model's own class would split by other rules
    special = {name: value for name, value in read.special_tokens_map.items() if value}
    tokenizer = make(tokenizer_object=backend, **special)
    tokenizer.chat_template = read.chat_template
    return tokenizer


def _mend_split(backend: Any, file: str, reader: Any) -> None:
    """Correct the pre-tokenizer if transformers does not know the file's name for it and used GPT-2's."""
    from tokenizers import pre_tokenizers

    if type(backend.pre_tokenizer) is not pre_tokenizers.ByteLevel:
        return  # transformers knew it, or the tokenizer does not split
    name = _field(reader, "tokenizer.ggml.pre") or "default"
    if name == _SMOLLM_SPLIT:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif name not in _GPT2_SPLITS:
        raise CheckpointError(
            f"{file!r} splits words by the rule {name!r}, which transformers does not know: "
            "its tokens would differ from those in training. "
            "Remedy: get the model as safetensors, with its tokenizer.json."
        )


def _field(reader: Any, name: str) -> str:
    field = reader.get_field(name)
    return str(field.contents()) if field is not None else ""


def _mend_rope(config: Any, file: str, reader: Any) -> None:
    """Scale the rotary embedding as the file states, which transformers reads for few architectures only.

    Llama 3's scaling is a tensor, the divisor of each frequency. If some layers have a window (Gemma 3), only the
    others are scaled.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    prefix = f"{_field(reader, 'general.architecture')}.rope.scaling"
    kind = _field(reader, f"{prefix}.type").replace("none", "")
    divisors = {each.name: each.data for each in reader.tensors if each.name.startswith("rope_f")}
    if rope.get("rope_type", "default") != "default" or not (kind or divisors):
        return
    found: dict[str, Any] | None = None
    if divisors.keys() == {_LLAMA3_TENSOR}:
        found = _llama3(rope, divisors[_LLAMA3_TENSOR].tolist())
    elif kind in {"linear", "yarn"} and not divisors:
        found = {"rope_type": kind, "factor": float(_field(reader, f"{prefix}.factor") or 1.0)}
        if original := _field(reader, f"{prefix}.original_context_length"):
            found["original_max_position_embeddings"] = int(original)
    if found is None:
        raise CheckpointError(
            f"{file!r} scales its rotary embedding in a way that is not known ({', '.join(divisors) or kind}). "
            "Remedy: get the model as safetensors."
        )
    rope.update(found)


def _llama3(rope: Mapping[str, Any], divisors: list[float]) -> dict[str, Any] | None:
    """Return Llama 3's scaling with these divisors of the frequencies; None if it has others."""
    import torch

    from vsched_workers.families.own_modules import frequencies, llama3_scaled

    plain = frequencies(rope["rope_theta"], 2 * len(divisors))
    found = _LLAMA3 | {"factor": max(divisors)}
    same = torch.allclose(plain / llama3_scaled(plain, found), torch.tensor(divisors), rtol=1e-3)
    return found if same else None


def _mend_scores(config: Any) -> None:
    """Scale Gemma's attention scores as llama.cpp: the file does not state it, and the 27B models are an exception."""
    if hasattr(config, "query_pre_attn_scalar"):
        is_27b = (config.model_type, config.num_hidden_layers) in _GEMMA_27B
        by_width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = by_width if is_27b else config.head_dim


def _end_tokens(tokenizer: Any, reader: Any) -> list[int]:
    """Return the end-of-sequence token and the tokens that end a turn, which may be stated by their text only."""
    stated = [_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    words = tokenizer.get_vocab()
    if _field(reader, "general.architecture") == "gpt-oss":
        words = {}  # <|end|> ends a part of a turn
    named = {words[each] for each in _TURN_ENDS if each in words}
    return sorted({int(each) for each in stated if each} | named)


if __name__ == "__main__":
    _main(*sys.argv[1:])
