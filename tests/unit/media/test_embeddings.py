"""The safetensors reader, and all errors of embeddings."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.each_case import each_case
from tests.unit.media.fakes import (
    FakePreprocessor,
    TensorParts,
    embedding_file,
    framed,
    model_info,
    rows_of,
    tensor_of,
    tensors_file,
)
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media.embeddings import (
    HEADER_BYTES_MAX,
    Tensor,
    read_embedding,
    read_tensors,
    write_rows,
)
from vsched.media.references import MediaReference
from vsched.types import ModelInfo
from vsched.worker.contract import ImagePlan

NAMES = ("embeds", "grid_thw")
GRID = tensor_of(np.array([1, 2, 4]))
EMBEDS = tensor_of(rows_of(2))
ENTRY = {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}


class Read(NamedTuple):
    """A checked embedding."""

    embeds: Tensor
    plan: ImagePlan


def read(file: bytes, info: ModelInfo | None = None) -> Read:
    info = info or model_info()
    embeds, plan = read_embedding(file, FakePreprocessor(info), MediaConfig())
    assert isinstance(plan, ImagePlan)
    return Read(embeds, plan)


def written(embedding: Read, info: ModelInfo) -> npt.NDArray[np.uint8]:
    rows = np.zeros(embedding.plan.tokens * info.embedding_row_bytes, np.uint8)
    write_rows(embedding.embeds, info.dtype, rows)
    return rows


def as_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def test_read_tensors_reads_what_safetensors_writes() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    rows, grid = rows_of(2), np.array([[1, 2, 4]])
    file = safetensors.save({"embeds": rows, "grid_thw": grid}, metadata={"made": "by a test"})
    tensors = read_tensors(file, NAMES)
    assert {name: (one.dtype, one.shape) for name, one in tensors.items()} == {
        "embeds": ("F32", (2, 8)),
        "grid_thw": ("I64", (1, 3)),
    }
    assert bytes(tensors["embeds"].data) == rows.tobytes()
    assert bytes(tensors["grid_thw"].data) == grid.tobytes()


def header(**entries: object) -> bytes:
    return json.dumps(entries).encode()


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "no header": b"\x00" * 7,
    "header past the end": (25).to_bytes(8, "little") + b"{}",
    "empty header": framed(b"", b""),
    "not JSON": framed(b"{", b""),
    "not UTF-8": framed(b'{"\xff":1}', b""),
    "a list": framed(b"[]", b""),
    "nested": framed(b'{"embeds":' + b"[" * 50_000, b""),
    "leading blank": framed(b" " + header(grid_thw=ENTRY), bytes(24)),
    "another tensor": framed(header(weights=ENTRY), bytes(24)),
    "no entry": framed(header(grid_thw=3), b""),
    "no dtype": framed(header(grid_thw={"shape": [3], "data_offsets": [0, 24]}), bytes(24)),
    "surplus key": framed(header(grid_thw={**ENTRY, "stride": 1}), bytes(24)),
    "negative dimension": framed(header(grid_thw={**ENTRY, "shape": [-3]}), bytes(24)),
    "many dimensions": framed(header(grid_thw={**ENTRY, "shape": [1, 1, 1, 1, 3]}), bytes(24)),
    "negative offset": framed(header(grid_thw={**ENTRY, "data_offsets": [-1, 23]}), bytes(24)),
    "three offsets": framed(header(grid_thw={**ENTRY, "data_offsets": [0, 24, 0]}), bytes(24)),
    "past the end": framed(header(grid_thw=ENTRY), bytes(23)),
    "trailing bytes": framed(header(grid_thw=ENTRY), bytes(25)),
    "backwards": framed(header(grid_thw={**ENTRY, "data_offsets": [24, 0]}), bytes(24)),
    "gap": framed(header(grid_thw={**ENTRY, "data_offsets": [1, 25]}), bytes(25)),
    "too few bytes for the shape": framed(
        header(grid_thw={**ENTRY, "data_offsets": [0, 16]}), bytes(16)
    ),
    "overlap": framed(header(grid_thw=ENTRY, embeds=ENTRY), bytes(24)),
    "huge shape": framed(header(grid_thw={**ENTRY, "shape": [2**62, 2**62]}), bytes(24)),
    "metadata is no table": framed(header(__metadata__=[1], grid_thw=ENTRY), bytes(24)),
}


@each_case("name", MALFORMED)
def test_read_tensors_refuses_input_that_is_malformed(name: str) -> None:
    """A strict reader; the error quotes nothing of the file."""
    with pytest.raises(RequestRefused, match="the embeddings are malformed: .*Remedy: ") as caught:
        read_tensors(MALFORMED[name], NAMES)
    assert (caught.value.code, caught.value.status) == ("embeddings_invalid", 400)
    assert len(caught.value.message) < 250
    assert "weights" not in caught.value.message


def test_read_tensors_bounds_the_header_before_parsing() -> None:
    """Value, limit and remedy."""
    padded = header(grid_thw=ENTRY).ljust(HEADER_BYTES_MAX)
    assert list(read_tensors(framed(padded, bytes(24)), NAMES)) == ["grid_thw"]
    with pytest.raises(RequestRefused, match="value 65537 bytes, limit 65536 bytes. Remedy: "):
        read_tensors(framed(padded + b" ", bytes(24)), NAMES)
    with pytest.raises(RequestRefused, match=f"value {2**64 - 1} bytes"):
        read_tensors(b"\xff" * 8, NAMES)


@given(st.binary(max_size=200), st.integers(0, 90))
@settings(max_examples=50)
def test_read_tensors_survives_any_bytes(noise: bytes, place: int) -> None:
    """Any input ends in a result or a refusal."""
    file = bytearray(embedding_file())
    file[8 + place : 8 + place + len(noise)] = noise
    for hostile in (bytes(file), noise, framed(noise, b"")):
        with contextlib.suppress(RequestRefused):
            assert read(hostile).plan.tokens <= 64


def test_read_embedding_takes_either_shape_of_grid_and_integer() -> None:
    for found in (GRID, grid([1, 2, 4]), grid(1, 2, 4, dtype="int32")):
        embedding = read(tensors_file({"grid_thw": found, "embeds": EMBEDS}))
        assert (embedding.plan.metadata, embedding.plan.tokens) == (b"(1, 2, 4)", 2)


def grid(*sizes: int | Sequence[int], dtype: str = "int64") -> TensorParts:
    return tensor_of(np.array(sizes, dtype))


NO_GRID = r"no image has such a grid"
REFUSED: list[tuple[TensorParts | None, TensorParts | None, str, str]] = [
    (EMBEDS, None, "grid_thw_missing", "come without grid_thw. Remedy: add"),
    (None, GRID, "embeds_missing", "come without embeds. Remedy: add"),
    (None, None, "embeds_missing", "come without embeds"),
    (EMBEDS, grid(1, 2, 4, dtype="float32"), "grid_thw_dtype", "F32, limit I64 or I32. Remedy: "),
    (
        EMBEDS,
        grid([1, 2, 4], [1, 2, 4]),
        "grid_thw_shape",
        r"value \[2, 3\], limit \[3\] or \[1, 3\]: time, height, width",
    ),
    (EMBEDS, grid(1, 3, 4), "grid_thw_invalid", NO_GRID),
    (EMBEDS, grid(1, -2, -4), "grid_thw_invalid", NO_GRID),
    (
        tensor_of(rows_of(2, 7)),
        GRID,
        "embeds_hidden_size",
        r"value shape \[2, 7\], limit expected shape \[2, 8\]: .* hidden size 8. Remedy: ",
    ),
    (
        tensor_of(rows_of(2).reshape(16)),
        GRID,
        "embeds_hidden_size",
        r"value shape \[16\], limit expected shape \[2, 8\]",
    ),
    (tensor_of(rows_of(3)), GRID, "embeds_tokens", r"\[3, 8\], limit expected shape \[2, 8\]"),
    (tensor_of(rows_of(1)), GRID, "embeds_tokens", r"\[1, 8\], limit expected shape \[2, 8\]"),
    (tensor_of(rows_of(2).astype(np.float16)), GRID, "embeds_dtype", "value F16, limit F32. Rem"),
    (
        ("I16", (2, 8), bytes(32)),
        GRID,
        "embeds_dtype",
        "value another type, limit F64, F32, F16, BF16, I64, I32",
    ),
    (
        tensor_of(rows_of(65)),
        grid(1, 26, 10),
        "image_tokens_exceeded",
        "value 65 tokens, limit 64 tokens. Remedy: ",
    ),
    (EMBEDS, grid(2**62, 2**62, 2**62), "image_tokens_exceeded", "limit 64 tokens"),
]


@each_case(("embeds", "grid_thw", "code", "text"), REFUSED)
def test_read_embedding_refuses(
    embeds: TensorParts | None, grid_thw: TensorParts | None, code: str, text: str
) -> None:
    """A code that names the companion, expected and actual shape, limit and remedy."""
    tensors = {"embeds": embeds, "grid_thw": grid_thw}
    with pytest.raises(RequestRefused, match=text) as caught:
        read(tensors_file({name: each for name, each in tensors.items() if each is not None}))
    assert (caught.value.code, caught.value.status) == (code, 400)


def test_read_embedding_wants_every_level_in_a_row() -> None:
    info = model_info(embedding_levels=3)
    assert read(embedding_file(rows_of(2, 24)), info).plan.tokens == 2
    with pytest.raises(
        RequestRefused, match=r"\[2, 8\], limit expected shape \[2, 24\].* 3 embedd"
    ):
        read(embedding_file(rows_of(2, 8)), info)


def served(rows: npt.NDArray[np.float32], dtype: str) -> tuple[npt.NDArray[Any], str]:
    """Convert rows to a served dtype; return them with its name in files."""
    if dtype == "float16":
        return rows.astype(np.float16), "F16"
    return (as_bfloat16(rows), "BF16") if dtype == "bfloat16" else (rows, "F32")


@each_case("dtype", ["float32", "float16", "bfloat16"])
def test_write_rows_copies_the_served_dtype(dtype: str) -> None:
    rows, kind = served(rows_of(2), dtype)
    info = model_info(dtype=dtype)
    embedding = read(embedding_file(rows, embeds=kind), info)
    assert written(embedding, info).tobytes() == rows.tobytes()


def test_write_rows_converts_float32() -> None:
    rows = rows_of(2) * 1000
    half = model_info(dtype="float16")
    found = written(read(embedding_file(rows), half), half).view(np.float16)
    assert (found == rows.astype(np.float16).reshape(-1)).all()


@given(
    st.lists(
        st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False), min_size=16, max_size=16
    )
)
@settings(max_examples=30)
def test_write_rows_rounds_to_the_nearest_bfloat16(values: list[float]) -> None:
    rows = np.array(values, np.float32).reshape(2, 8)
    info = model_info(dtype="bfloat16")
    found = written(read(embedding_file(rows), info), info).view(np.uint16)
    for value, bits in zip(rows.reshape(-1), found, strict=True):
        below = int(np.float32(value).view(np.uint32)) >> 16
        near = [(_widened(near) - float(value), near) for near in (below, below + 1)]
        best = min(near, key=lambda pair: (abs(pair[0]), pair[1] & 1))
        assert int(bits) == best[1]


def _widened(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


@each_case(
    ("dtype", "given_as"),
    [
        ("float32", "float32"),
        *((dtype, given) for dtype in ("float16", "bfloat16") for given in ("float32", dtype)),
    ],
)
def test_write_rows_refuses_input_that_is_not_finite(dtype: str, given_as: str) -> None:
    """NaN and infinity in either dtype, and values beyond the served one."""
    info = model_info(dtype=dtype)
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        rows = rows_of(2)
        rows[1, 7] = value
        converted, kind = served(rows, given_as)
        with pytest.raises(RequestRefused, match="Remedy: ") as caught:
            written(read(embedding_file(converted, embeds=kind), info), info)
        assert caught.value.code == "embeds_not_finite"
    if given_as != dtype:
        rows = rows_of(2)
        rows[0, 0] = {"float16": -65520.0, "bfloat16": -3.4e38}[dtype]
        beyond = f"beyond {dtype}, limit finite numbers of {dtype}"
        with pytest.raises(RequestRefused, match=beyond):
            written(read(embedding_file(rows), info), info)


def test_write_rows_looks_at_every_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.media.embeddings._STRIP_VALUES", 5)
    info = model_info(dtype="bfloat16")
    rows = rows_of(2)
    whole = written(read(embedding_file(rows), info), info)
    assert (whole.view(np.uint16) - as_bfloat16(rows).reshape(-1) <= 1).all()
    rows[1, 7] = math.inf
    with pytest.raises(RequestRefused):
        written(read(embedding_file(rows), info), info)


def test_embedded_image_is_never_shown() -> None:
    """Neither a log nor an error holds the client's data."""
    reference = MediaReference("AAAA", is_embedded=True)
    assert "AAAA" not in repr(reference) + str([reference])
