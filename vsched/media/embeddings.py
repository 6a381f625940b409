"""Precomputed embeddings of images and videos from clients: safetensors files, parsed without trust and without torch.

A safetensors file has a length of 8 bytes, JSON of that length with each tensor's type, shape and byte range, and then
the tensors. This reader is strict: the header is limited before it is parsed, every range must have the size of its
type and shape, and the ranges must cover the data without gaps or overlaps. numpy has no bfloat16, so its values are
handled as 16-bit integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import RequestRefused, limit_message
from vsched.plain_values import shared_decoder
from vsched.types import ModelInfo
from vsched.worker.contract import Companion, ItemPlan, Preprocessor

if TYPE_CHECKING:
    from vsched.config.sections import MediaConfig

HEADER_BYTES_MAX: Final = 64 * 1024
EMBEDS: Final = "embeds"
_METADATA: Final = "__metadata__"
_STRIP_VALUES: Final = 1 << 18
"""Values processed at a time: limits the extra memory of a conversion."""

_VALUE_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
_FILE_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_INTEGERS: Final = {"I64": "<i8", "I32": "<i4"}
_SECONDS: Final = {"F64": "<f8", "F32": "<f4"}
_EXPONENT: Final = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
"""Exponent bits: a value in which all are set is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: its type as named in the file, and its bytes as a view of the file."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview = field(repr=False)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows [start, stop)."""
        size = len(self.data) // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return Tensor(self.dtype, shape, self.data[start * size : stop * size])


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=4)]
    data_offsets: tuple[_Size, _Size]


def malformed(detail: str) -> RequestRefused:
    """Error for a malformed embedding file."""
    return RequestRefused(
        f"the embeddings are malformed: {detail}. "
        "Remedy: send a safetensors file in base64, with the tensor embeds and the other tensors that the model needs.",
        code="embeddings_invalid",
    )


def read_tensors(file: bytes, names: Sequence[str]) -> dict[str, Tensor]:
    """Parse a safetensors file, which must not have tensors other than `names`.

    Raises:
        RequestRefused: If the header is too long or does not describe the data exactly.
    """
    if len(file) < 8:
        raise malformed("the file ends within its header")
    header_bytes = int.from_bytes(file[:8], "little")
    if header_bytes > HEADER_BYTES_MAX:
        message = limit_message(
            "the embeddings' safetensors header is too long",
            value=f"{header_bytes} bytes",
            limit=f"{HEADER_BYTES_MAX} bytes",
            remedy=f"send only the tensors {' and '.join(names)}, without metadata",
        )
        raise RequestRefused(message, code="embeddings_invalid")
    start = 8 + header_bytes
    if start > len(file):
        raise malformed("the file ends within its header")
    entries = _entries(file[8:start], names)
    data = memoryview(file)[start:]
    position = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
        begin, end = entry.data_offsets
        size = math.prod(entry.shape) * _VALUE_BYTES[entry.dtype]
        if begin != position or end - begin != size:
            raise malformed("a tensor's offsets do not fit its shape and the others")
        position = end
    if position != len(data):
        raise malformed("the tensors do not cover the file")
    return {
        name: Tensor(entry.dtype, tuple(entry.shape), data[slice(*entry.data_offsets)])
        for name, entry in entries.items()
    }


def _entries(header: bytes, names: Sequence[str]) -> dict[str, _TensorEntry]:
    entries: dict[str, _TensorEntry] = {}
    try:
        if not header.startswith(b"{"):
            raise malformed("its header is not a JSON object")
        for name, raw in msgspec.json.decode(header, type=dict[str, msgspec.Raw]).items():
            if name == _METADATA:
                msgspec.json.decode(raw, type=dict[str, str])
                continue
            if name not in names:
                raise malformed("it has another tensor")
            entries[name] = shared_decoder(_TensorEntry).decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # The parser's message may quote the file.
        raise malformed("its header is not valid") from None
    for name, entry in entries.items():
        if entry.dtype not in _VALUE_BYTES:
            raise _wrong_dtype(name, "another type", ", ".join(_VALUE_BYTES))
    return entries


def _wrong_dtype(name: str, found: str, expected: str) -> RequestRefused:
    message = limit_message(
        f"the embeddings' {name} have the wrong dtype",
        value=found,
        limit=expected,
        remedy=f"convert {name} before sending them",
    )
    return RequestRefused(message, code=f"{name}_dtype")


def read_embedding(
    file: bytes, front: Preprocessor, settings: MediaConfig, *, is_video: bool = False
) -> tuple[Tensor, ItemPlan]:
    """Parse the embedding file of an image or a video; check the companion tensor and all shapes.

    Values are checked by `write_rows`.

    Raises:
        RequestRefused: With a code for the missing or mismatched part.
    """
    info, companion, times = front.info, front.companion, front.video_times
    if companion is None or (is_video and not times):
        noun = "video" if is_video else "image"
        raise RequestRefused(
            f"the model takes no embeddings of {noun}s. Remedy: send the {noun} itself.",
            code="embeddings_not_taken",
        )
    names = (EMBEDS, companion.name, times) if is_video else (EMBEDS, companion.name)
    tensors = _all_tensors(file, names)
    integers = _integers(companion, tensors[companion.name])
    plan: ItemPlan
    if is_video:
        seconds = _seconds(times, tensors[times], settings.video_seconds_max)
        plan = front.plan_embedded_video(integers, seconds, frames_max=settings.video_frames_max)
        tokens = sum(group.tokens for group in plan.groups)
    else:
        plan = front.plan_embedding(integers)
        tokens = plan.tokens
        check_tokens(tokens, info)
    embeds = tensors[EMBEDS]
    accepted = dict.fromkeys((_FILE_DTYPES[info.dtype], "F32"))
    if embeds.dtype not in accepted:
        raise _wrong_dtype(EMBEDS, embeds.dtype, " or ".join(accepted))
    _check_shape(embeds, tokens, info, companion)
    return embeds, plan


def _all_tensors(file: bytes, names: Sequence[str]) -> dict[str, Tensor]:
    tensors = read_tensors(file, names)
    for name in names:
        if name not in tensors:
            message = (
                f"the embeddings come without {name}. "
                f"Remedy: add the tensor {name} to the safetensors file."
            )
            raise RequestRefused(message, code=f"{name}_missing")
    return tensors


def _seconds(name: str, tensor: Tensor, seconds_max: float) -> list[float]:
    if tensor.dtype not in _SECONDS:
        raise _wrong_dtype(name, tensor.dtype, " or ".join(_SECONDS))
    seconds: list[float] = np.frombuffer(tensor.data, _SECONDS[tensor.dtype]).tolist()
    for value in seconds:
        if not 0 <= value <= seconds_max:
            message = limit_message(
                f"the embeddings' {name} are out of bounds",
                value=value,
                limit=f"0 to {seconds_max:g} seconds",
                remedy="send the times in seconds, or raise media.video_seconds_max",
            )
            raise RequestRefused(message, code=f"{name}_invalid")
    return seconds


def _integers(companion: Companion, tensor: Tensor) -> list[int]:
    name, count = companion.name, len(companion.values)
    if tensor.dtype not in _INTEGERS:
        raise _wrong_dtype(name, tensor.dtype, " or ".join(_INTEGERS))
    if tensor.shape not in {(count,), (1, count)}:
        message = limit_message(
            f"the embeddings' {name} has the wrong shape",
            value=list(tensor.shape),
            limit=f"[{count}] or [1, {count}]: {', '.join(companion.values)}",
            remedy=f"send the {name} of this one image or video",
        )
        raise RequestRefused(message, code=f"{name}_shape")
    integers: list[int] = np.frombuffer(tensor.data, _INTEGERS[tensor.dtype]).tolist()
    return integers


def _check_shape(embeds: Tensor, tokens: int, info: ModelInfo, companion: Companion) -> None:
    expected = (tokens, info.hidden_size * info.embedding_levels)
    if embeds.shape == expected:
        return
    same_width = len(embeds.shape) == 2 and embeds.shape[1] == expected[1]
    message = limit_message(
        f"the embeddings have the wrong number of rows for their {companion.name}"
        if same_width
        else "the embeddings have the wrong hidden size",
        value=f"shape {list(embeds.shape)}",
        limit=f"expected shape {list(expected)}: tokens, "
        f"{info.embedding_levels} embedding levels of hidden size {info.hidden_size}",
        remedy="encode it with the vision tower of the served checkpoint",
    )
    raise RequestRefused(message, code="embeds_tokens" if same_width else "embeds_hidden_size")


def check_tokens(tokens: int, info: ModelInfo) -> None:
    """Reject an image with too many tokens, given as pixels or as an embedding.

    Raises:
        RequestRefused: With tokens, limit and remedy.
    """
    if tokens > info.item_tokens_max:
        message = limit_message(
            "the image has too many tokens",
            value=f"{tokens} tokens",
            limit=f"{info.item_tokens_max} tokens",
            remedy="send a smaller image or raise the encode stage's token budget",
        )
        raise RequestRefused(message, code="image_tokens_exceeded")


def write_rows(embeds: Tensor, dtype: str, rows: npt.NDArray[np.uint8]) -> None:
    """Convert embeddings to the served dtype, and check their values.

    Shape: `rows` is uint8 [tokens * row bytes].

    Blocks: while all values are processed; call it off the event loop.

    Raises:
        RequestRefused: If a value is NaN or infinite, or becomes so in the served dtype.
    """
    served = _FILE_DTYPES[dtype]
    given = embeds.dtype
    values = np.frombuffer(embeds.data, _BITS[given])
    out = rows.view(_BITS[served])
    for start in range(0, len(values), _STRIP_VALUES):
        strip = values[start : start + _STRIP_VALUES]
        _check_finite(strip, given, dtype)
        if given != served:
            strip = _NARROWED[served](strip)
            _check_finite(strip, served, dtype)
        out[start : start + len(strip)] = strip


_Bits = npt.NDArray[np.unsignedinteger]
_BITS: Final = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}


def _check_finite(bits: _Bits, kind: str, served: str) -> None:
    mask = bits.dtype.type(_EXPONENT[kind])
    if not ((bits & mask) == mask).any():
        return
    message = limit_message(
        "the embeddings hold values that cannot be served",
        value=f"NaN, an infinity, or a number beyond {served}",
        limit=f"finite numbers of {served}",
        remedy="encode the image or video again",
    )
    raise RequestRefused(message, code="embeds_not_finite")


def _to_bfloat16(bits: _Bits) -> _Bits:
    # Round to nearest, ties to even: the carry of the dropped half is added to the kept one. Finite values cannot
    # overflow 32 bits here, and the caller checks for values that round to infinity.
    return (
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype("<u2")


def _to_float16(bits: _Bits) -> _Bits:
    with np.errstate(over="ignore", under="ignore"):
        return bits.view("<f4").astype("<f2").view("<u2")


_NARROWED: Final[Mapping[str, Callable[[_Bits], _Bits]]] = {
    "BF16": _to_bfloat16,
    "F16": _to_float16,
}
