"""The safetensors reader, and all errors of embeddings."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.media.fakes import (
    FakePreprocessor,
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


@pytest.mark.parametrize("name", MALFORMED)
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
    for grid in (np.array([1, 2, 4]), np.array([[1, 2, 4]]), np.array([1, 2, 4], np.int32)):
        embedding = read(tensors_file({"grid_thw": tensor_of(grid), "embeds": EMBEDS}))
        assert (embedding.plan.metadata, embedding.plan.tokens) == (b"(1, 2, 4)", 2)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no grid": ({"embeds": EMBEDS}, "grid_thw_missing", "come without grid_thw. Remedy: add"),
    "no rows": ({"grid_thw": GRID}, "embeds_missing", "come without embeds. Remedy: add"),
    "nothing": ({}, "embeds_missing", "come without embeds"),
    "grid of floats": (
        {"embeds": EMBEDS, "grid_thw": tensor_of(np.array([1, 2, 4], np.float32))},
        "grid_thw_dtype",
        "value F32, limit I64 or I32. Remedy: ",
    ),
    "two grids": (
        {"embeds": EMBEDS, "grid_thw": tensor_of(np.array([[1, 2, 4]] * 2))},
        "grid_thw_shape",
        r"value \[2, 3\], limit \[3\] or \[1, 3\]: time, height, width",
    ),
    "odd grid": (
        {"embeds": EMBEDS, "grid_thw": tensor_of(np.array([1, 3, 4]))},
        "grid_thw_invalid",
        "no image has such a grid",
    ),
    "negative grid": (
        {"embeds": EMBEDS, "grid_thw": tensor_of(np.array([1, -2, -4]))},
        "grid_thw_invalid",
        "no image has such a grid",
    ),
    "narrow rows": (
        {"embeds": tensor_of(rows_of(2, 7)), "grid_thw": GRID},
        "embeds_hidden_size",
        r"value shape \[2, 7\], limit expected shape \[2, 8\]: .* hidden size 8. Remedy: ",
    ),
    "flat rows": (
        {"embeds": tensor_of(rows_of(2).reshape(16)), "grid_thw": GRID},
        "embeds_hidden_size",
        r"value shape \[16\], limit expected shape \[2, 8\]",
    ),
    "a row too many": (
        {"embeds": tensor_of(rows_of(3)), "grid_thw": GRID},
        "embeds_tokens",
        r"value shape \[3, 8\], limit expected shape \[2, 8\]",
    ),
    "a row too few": (
        {"embeds": tensor_of(rows_of(1)), "grid_thw": GRID},
        "embeds_tokens",
        r"value shape \[1, 8\], limit expected shape \[2, 8\]",
    ),
    "another float": (
        {"embeds": tensor_of(rows_of(2).astype(np.float16)), "grid_thw": GRID},
        "embeds_dtype",
        "value F16, limit F32. Remedy: ",
    ),
    "an unknown type": (
        {"embeds": ("I16", (2, 8), bytes(32)), "grid_thw": GRID},
        "embeds_dtype",
        "value another type, limit F64, F32, F16, BF16, I64, I32",
    ),
    "too many tokens": (
        {"embeds": tensor_of(rows_of(65)), "grid_thw": tensor_of(np.array([1, 26, 10]))},
        "image_tokens_exceeded",
        "value 65 tokens, limit 64 tokens. Remedy: ",
    ),
    "tokens beyond 64 bits": (
        {"embeds": EMBEDS, "grid_thw": tensor_of(np.array([2**62, 2**62, 2**62]))},
        "image_tokens_exceeded",
        "limit 64 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_read_embedding_refuses(name: str) -> None:
    """A code that names the companion, expected and actual shape, limit and remedy."""
    tensors, code, text = REFUSED[name]
    with pytest.raises(RequestRefused, match=text) as caught:
        read(tensors_file(tensors))
    assert (caught.value.code, caught.value.status) == (code, 400)


def test_read_embedding_wants_every_level_in_a_row() -> None:
    info = model_info(embedding_levels=3)
    assert read(embedding_file(rows_of(2, 24)), info).plan.tokens == 2
    with pytest.raises(
        RequestRefused, match=r"\[2, 8\], limit expected shape \[2, 24\].* 3 embedd"
    ):
        read(embedding_file(rows_of(2, 8)), info)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_write_rows_copies_the_served_dtype(dtype: str) -> None:
    rows: npt.NDArray[Any] = rows_of(2)
    kind = {"float16": "F16", "bfloat16": "BF16"}.get(dtype, "F32")
    if kind != "F32":
        rows = rows.astype(np.float16) if kind == "F16" else as_bfloat16(rows)
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("given_as_served", [True, False])
def test_write_rows_refuses_input_that_is_not_finite(
    dtype: str, value: float, given_as_served: bool
) -> None:
    rows: npt.NDArray[Any] = rows_of(2)
    rows[1, 7] = value
    kind = "F32"
    if given_as_served and dtype != "float32":
        kind = {"float16": "F16", "bfloat16": "BF16"}[dtype]
        rows = rows.astype(np.float16) if kind == "F16" else as_bfloat16(rows)
    info = model_info(dtype=dtype)
    with pytest.raises(RequestRefused, match="Remedy: ") as caught:
        written(read(embedding_file(rows, embeds=kind), info), info)
    assert caught.value.code == "embeds_not_finite"


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65520.0), ("bfloat16", 3.4e38)])
def test_write_rows_refuses_values_that_overflow(dtype: str, value: float) -> None:
    info = model_info(dtype=dtype)
    rows = rows_of(2)
    rows[0, 0] = -value
    with pytest.raises(RequestRefused, match=f"beyond {dtype}, limit finite numbers of {dtype}"):
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
    assert "AAAA" not in repr(MediaReference("AAAA", is_embedded=True))
    assert "AAAA" not in str([MediaReference("AAAA", is_embedded=True)])
