"""Embeddings of images and videos: the safetensors reader, all errors, mixed with images, bounded and shared."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import re
import struct
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.each_case import each_case
from tests.unit.media.fakes import (
    VIDEO_PLACEHOLDER,
    FakePreprocessor,
    TensorParts,
    data_url,
    embedded,
    embedding_file,
    framed,
    image_bytes,
    model_info,
    rows_of,
    tensor_of,
    tensors_file,
)
from tests.unit.media.pipelines import Bench
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media import MediaReference
from vsched.media.embeddings import HEADER_BYTES_MAX, read_embedding, write_rows
from vsched.media.keys import embedding_key, item_key
from vsched.types import ModelInfo
from vsched.worker.contract import ImagePlan

IMAGE = data_url(image_bytes())
GRID = tensor_of(np.array([1, 2, 4]))
EMBEDS = tensor_of(rows_of(2))
FILE = embedding_file()
ENTRY = {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}


def bench_with(info: dict[str, Any] | None = None, **settings: Any) -> Bench:
    """Return a bench with embeddings allowed, of a model that takes videos."""
    made = model_info(**{"video_token_id": VIDEO_PLACEHOLDER, **(info or {})})
    return Bench(MediaConfig(**{"allow_embeddings": True, **settings}), FakePreprocessor(made))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with bench_with() as bench:
        yield bench


async def test_embeddings_mix_with_images_in_order(bench: Bench) -> None:
    """Rows in the arena, placeholders expanded, the encoder's work marked as done."""
    rows = rows_of(6)
    brought = embedded(embedding_file(rows, (1, 4, 6)))
    first, last = data_url(image_bytes(value=9)), data_url(image_bytes(8, 24, value=4))
    prepared = await bench.prepare("a\x01b\x01c\x01", [first, brought, last])
    assert prepared.token_ids == [97, 1, 1, 98, *[1] * 6, 99, 1, 1, 1]
    assert [(one.offset, one.tokens, one.metadata, one.encoded) for one in prepared.items] == [
        (1, 2, b"(1, 2, 4)", False),
        (4, 6, b"(1, 4, 6)", True),
        (11, 3, b"(1, 6, 2)", False),
    ]
    one, embeddings, other = map(bench.pixels, prepared.items)
    assert embeddings.tobytes() == rows.tobytes()
    assert one.view(np.float32).tolist() == [9.0] * 2 * 4 * 48
    assert other.view(np.float32).tolist() == [4.0] * 3 * 4 * 48
    statistics = bench.pipeline.statistics()
    assert (statistics.processed, statistics.embedded) == (2, 1)


async def test_embeddings_of_a_video_are_items_of_frame_groups(bench: Bench) -> None:
    """Rows, metadata and placeholders of each group; equal groups have one key and extent, in any request."""
    rows = rows_of(8)
    rows[4:6] = rows[0:2]
    file = embedding_file(rows, (4, 2, 4), (0.5, 1.5, 2.5, 3.5))
    prepared = await bench.prepare("\x01a\x02b", [IMAGE, embedded(file, is_video=True)])
    assert prepared.token_ids == [1, 1, 97, *[50, 2, 2] * 4, 98]
    groups = prepared.items[1:]
    found = [(one.offset, one.tokens, one.metadata, one.encoded) for one in groups]
    times = (b"0.5", b"1.5", b"2.5", b"3.5")
    assert found == [(4 + 3 * index, 2, time, True) for index, time in enumerate(times)]
    assert b"".join(bench.pixels(group).tobytes() for group in groups) == rows.tobytes()
    assert groups[0].key == groups[2].key
    assert len({item.key for item in prepared.items}) == len(prepared.lease.extents) == 4
    longer = np.concatenate([rows, rows_of(2, seed=1)])
    file = embedding_file(longer, (5, 2, 4), [0.0, 1.0, 2.0, 3.0, 4.0])
    extended = await bench.prepare("\x02", [embedded(file, is_video=True)])
    assert [one.key for one in extended.items[:4]] == [one.key for one in groups]
    assert extended.items[0].extent == groups[0].extent
    other = await bench.prepare("\x02", [embedded(file, is_video=True)], "tenant")
    assert not {one.key for one in other.items} & {one.key for one in extended.items}


def header(**entries: object) -> bytes:
    return json.dumps(entries).encode()


PADDED = header(grid_thw=ENTRY, embeds={"dtype": "F32", "shape": [2, 8], "data_offsets": [24, 88]})
PADDED = PADDED.ljust(HEADER_BYTES_MAX)
CONTENT = GRID[2] + EMBEDS[2]


async def test_files_are_taken_with_either_grid_and_header(bench: Bench) -> None:
    """Also files that safetensors writes, and the longest header."""
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = {"embeds": rows_of(2), "grid_thw": np.array([[1, 2, 4]])}
    for file in (
        safetensors.save(tensors, metadata={"made": "by a test"}),
        tensors_file({"grid_thw": grid(1, 2, 4, dtype="int32"), "embeds": EMBEDS}),
        framed(PADDED, CONTENT),
    ):
        (item,) = (await bench.prepare("\x01", [embedded(file)])).items
        assert (item.tokens, item.metadata) == (2, b"(1, 2, 4)")
        assert bench.pixels(item).tobytes() == rows_of(2).tobytes()


def grid(*sizes: int | Sequence[int], dtype: str = "int64") -> TensorParts:
    return tensor_of(np.array(sizes, dtype))


def times(*seconds: float) -> MediaReference:
    return video_with(timestamps=tensor_of(np.array(seconds)))


def base64_image(text: str) -> MediaReference:
    return MediaReference(text, is_embedded=True)


TENSORS = {"embeds": EMBEDS, "grid_thw": GRID}
VIDEO = {
    "embeds": tensor_of(rows_of(4)),
    "grid_thw": tensor_of(np.array([2, 2, 4])),
    "timestamps": tensor_of(np.array([0.5, 1.5])),
}


def image_with(*, is_video: bool = False, **changed: TensorParts | None) -> MediaReference:
    """Embeddings with other tensors; a tensor that is None is left out."""
    tensors = (VIDEO if is_video else TENSORS) | changed
    file = tensors_file({name: each for name, each in tensors.items() if each is not None})
    return embedded(file, is_video=is_video)


def video_with(**changed: TensorParts | None) -> MediaReference:
    return image_with(is_video=True, **changed)


MALFORMED: dict[str, bytes] = {
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
    "too few bytes": framed(header(grid_thw={**ENTRY, "data_offsets": [0, 16]}), bytes(16)),
    "overlap": framed(header(grid_thw=ENTRY, embeds=ENTRY), bytes(24)),
    "huge shape": framed(header(grid_thw={**ENTRY, "shape": [2**62, 2**62]}), bytes(24)),
    "metadata is no table": framed(header(__metadata__=[1], grid_thw=ENTRY), bytes(24)),
}


@each_case(
    ("brought", "code", "text"),
    [
        *(
            (embedded(file), "embeddings_invalid", "the embeddings are malformed: .*Remedy: ")
            for file in MALFORMED.values()
        ),
        (embedded(framed(PADDED + b" ", CONTENT)), "embeddings_invalid",
         "value 65537 bytes, limit 65536 bytes"),
        (embedded(b"\xff" * 8), "embeddings_invalid", f"value {2**64 - 1} bytes"),
        (image_with(grid_thw=None), "grid_thw_missing", "come without grid_thw. Remedy: add"),
        (image_with(embeds=None), "embeds_missing", "come without embeds. Remedy: add"),
        (image_with(embeds=None, grid_thw=None), "embeds_missing", "come without embeds"),
        (image_with(grid_thw=grid(1, 2, 4, dtype="float32")), "grid_thw_dtype",
         "F32, limit I64 or I32. Remedy: "),
        (image_with(grid_thw=grid([1, 2, 4], [1, 2, 4])), "grid_thw_shape",
         r"value \[2, 3\], limit \[3\] or \[1, 3\]: time, height, width"),
        (image_with(grid_thw=grid(1, 3, 4)), "grid_thw_invalid", "no image has such a grid"),
        (image_with(grid_thw=grid(1, -2, -4)), "grid_thw_invalid", "no image has such a grid"),
        (image_with(embeds=tensor_of(rows_of(2, 7))), "embeds_hidden_size",
         r"value shape \[2, 7\], limit expected shape \[2, 8\]: .* hidden size 8. Remedy: "),
        (image_with(embeds=tensor_of(rows_of(2).reshape(16))), "embeds_hidden_size",
         r"value shape \[16\], limit expected shape \[2, 8\]"),
        (image_with(embeds=tensor_of(rows_of(3))), "embeds_tokens",
         r"\[3, 8\], limit expected shape \[2, 8\]"),
        (image_with(embeds=tensor_of(rows_of(1))), "embeds_tokens",
         r"\[1, 8\], limit expected shape \[2, 8\]"),
        (image_with(embeds=tensor_of(rows_of(2).astype(np.float16))), "embeds_dtype",
         "value F16, limit F32. Remedy"),
        (image_with(embeds=("I16", (2, 8), bytes(32))), "embeds_dtype",
         "value another type, limit F64, F32, F16, BF16, I64, I32"),
        (image_with(embeds=tensor_of(rows_of(65)), grid_thw=grid(1, 26, 10)),
         "image_tokens_exceeded", "value 65 tokens, limit 64 tokens. Remedy: "),
        (image_with(grid_thw=grid(2**62, 2**62, 2**62)), "image_tokens_exceeded",
         "limit 64 tokens"),
        (video_with(timestamps=None), "timestamps_missing", "come without timestamps. Remedy: add"),
        (times(1, 2), "timestamps_dtype", "value I64, limit F64"),
        (times(0, 1e9), "timestamps_invalid", "0 to 3600 seconds"),
        (times(0, -1.0), "timestamps_invalid", "value -1.0"),
        (times(0, np.nan), "timestamps_invalid", "value nan"),
        (video_with(embeds=tensor_of(rows_of(5))), "embeds_tokens", r"expected shape \[4, 8\]"),
        (video_with(embeds=tensor_of(rows_of(4) * np.float32("nan"))), "embeds_not_finite", "NaN"),
        (video_with(more=tensor_of(rows_of(1))), "embeddings_invalid", "another tensor"),
        (embedded(tensors_file(VIDEO)[:-1], is_video=True), "embeddings_invalid", "malformed"),
        *(
            (base64_image(text), "embeddings_invalid", "its base64 is not valid")
            for text in ("???", "AAA==", "AA===", "\ud800", "")
        ),
        (base64_image("AA\nA"), "embeddings_invalid", "ends within its header"),
        (image_with(embeds=tensor_of(rows_of(2) * np.float32("inf"))), "embeds_not_finite",
         "cannot be served"),
    ],
)  # fmt: skip
async def test_bad_embedding_fails_alone(brought: MediaReference, code: str, text: str) -> None:
    """The client's error has index, code, limit and remedy, and quotes nothing of the file.

    Another request is not affected, and nothing is kept.
    """
    async with bench_with() as bench:
        beside = bench.start("\x01", [data_url(image_bytes(value=5))])
        await asyncio.sleep(0)
        prompt = "\x01\x02" if brought.is_video else "\x01\x01"
        with pytest.raises(RequestRefused, match=text) as caught:
            await bench.prepare(prompt, [IMAGE, brought])
        assert (caught.value.code, caught.value.status) == (code, 400)
        assert caught.value.message.startswith(f"{brought.noun} 1: ")
        assert "Remedy: " in caught.value.message
        assert "weights" not in caught.value.message
        assert code != "embeddings_invalid" or len(caught.value.message) < 260
        await beside


TWO = [embedded(FILE), embedded(embedding_file(rows_of(2, seed=1)))]
OFF = ["http://host.invalid/x", base64_image("?")]


@each_case(
    ("settings", "brought", "status", "code", "text"),
    [
        ({"allow_embeddings": False, "hosts": ("host.invalid",)}, OFF, 400, "embeddings_disabled",
         "image 1: .*Remedy: send the image itself or set media.allow_embeddings = true"),
        ({"images_max": 1}, TWO, 400, "too_many_images", "limit 1 images"),
        ({"videos_max": 1}, [video_with()] * 2, 400, "too_many_videos", "limit 1 videos"),
        ({"request_bytes_max": 2 * len(FILE) - 1}, TWO, 413, "images_too_large", "image 1: "),
        ({"image_bytes_max": len(FILE) - 1}, TWO, 413, "embedding_too_large",
         f"the encoded embedding is too large: .*limit {len(FILE) - 1} bytes. Remedy: "),
        ({"image_bytes_max": len(FILE) - 3}, TWO, 413, "embedding_too_large", "Remedy: "),
    ],
)  # fmt: skip
async def test_embeddings_count_towards_every_bound(
    settings: dict[str, Any], brought: list[Any], status: int, code: str, text: str
) -> None:
    """Switched off by default; then they are refused before anything is fetched."""
    assert not MediaConfig().allow_embeddings
    async with bench_with(**settings) as bench:
        error = await bench.refusal("\x01\x01", brought)
    assert (error.code, error.status) == (code, status)
    assert re.search(text, error.message)


async def test_embeddings_of_videos_need_a_model_that_takes_them(bench: Bench) -> None:
    bench.preprocessor.video_times = ""
    assert (await bench.refusal("\x02", [video_with()])).code == "embeddings_not_taken"
    async with bench_with({"video_token_id": None}) as other:
        assert (await other.refusal("\x02", [video_with()])).code == "videos_not_taken"


async def test_embeddings_by_reference(tmp_path: Path) -> None:
    """A file of the allowed folder, of an allowed host, or a data: URL has the key of its base64."""
    (folder := tmp_path / "allowed").mkdir()
    files = {"image": embedding_file(), "video": tensors_file(VIDEO)}
    for name, file in files.items():
        (folder / name).write_bytes(file)
    (tmp_path / "outside").write_bytes(files["image"])
    (folder / "link").symlink_to(tmp_path / "outside")
    settings = MediaConfig(allow_embeddings=True, directory=str(folder))
    preprocessor = FakePreprocessor(model_info(video_token_id=VIDEO_PLACEHOLDER))
    remote = {f"https://host/{name}": file for name, file in files.items()}

    def references(image: str, video: str) -> list[MediaReference]:
        return [base64_image(image), MediaReference(video, is_video=True, is_embedded=True)]

    async with Bench(settings, preprocessor, remote=remote) as bench:
        keys = set()
        for sources in (
            [base64.b64encode(file).decode() for file in files.values()],
            [f"file://{folder}/{name}" for name in files],
            list(remote),
            [data_url(file, "application/octet-stream") for file in files.values()],
        ):
            prepared = await bench.prepare("\x01\x02", references(*sources))
            keys.add(tuple(item.key for item in prepared.items))
        assert len(keys) == 1
        for path in ("link", "none", "../outside"):
            for reference in references(*[f"file://{folder}/{path}"] * 2):
                error = await bench.refusal("\x01", [reference])
                assert (error.code, error.status) == ("embedding_file_refused", 400)
        wrong = base64_image(data_url(files["image"], "image/png"))
        assert (await bench.refusal("\x01", [wrong])).code == "embedding_type_unsupported"
        (folder / "image").write_bytes(files["image"].ljust(settings.image_bytes_max + 1))
        error = await bench.refusal("\x01", [base64_image(f"file://{folder}/image")])
        assert (error.code, error.status) == ("embedding_too_large", 413)
        assert "media.image_bytes_max" in error.message


@each_case("dtype", ["bfloat16", "float16"])
async def test_extent_has_every_level_in_a_row_of_the_served_dtype(dtype: str) -> None:
    async with bench_with({"dtype": dtype, "embedding_levels": 3}) as bench:
        prepared = await bench.prepare("\x01", [embedded(embedding_file(rows_of(2, 24)))])
        assert bench.pixels(prepared.items[0]).nbytes == 2 * 24 * 2
        error = await bench.refusal("\x01", [embedded(FILE)])
        assert re.search(r"\[2, 8\], limit expected shape \[2, 24\].* 3 embedd", error.message)


async def test_length_is_checked_before_base64() -> None:
    """50 MB cost the memory of a few pieces; a file of exactly the limit is accepted."""
    async with bench_with(image_bytes_max=len(FILE)) as bench:
        await bench.prepare("\x01", [embedded(FILE)])
        brought = base64_image("A" * 50_000_000)
        tracemalloc.start()
        try:
            assert (await bench.refusal("\x01", [brought])).status == 413
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()


def test_embedding_key_separates_every_part() -> None:
    """Full width, typed, length-framed; stable across processes, hosts and releases."""
    base = {
        "settings_digest": b"s", "cache_salt": "", "served": ("float32", 8, 1), "dtype": "F32",
        "shape": (2, 8), "metadata": struct.pack("<3q", 1, 2, 4), "rows": memoryview(b"rows"),
    }  # fmt: skip
    changed: list[dict[str, object]] = [
        {},
        {"settings_digest": b"t"},
        {"settings_digest": b"", "cache_salt": "s"},
        {"cache_salt": "tenant"},
        {"served": ("bfloat16", 8, 1)},
        {"served": ("float32", 4, 2)},
        {"served": ("float32", 1, 8)},
        {"dtype": "BF16"},
        {"shape": (8, 2)},
        {"shape": (2, 8, 1), "metadata": struct.pack("<2q", 2, 4)},
        {"metadata": struct.pack("<3q", 1, 4, 2)},
        {"rows": memoryview(b"swor")},
    ]
    keys = {embedding_key(**{**base, **change}) for change in changed}  # type: ignore[arg-type]
    assert len(keys) == len(changed)
    assert {len(key) for key in keys} == {32}
    key = embedding_key(**base)  # type: ignore[arg-type]
    assert key.hex().startswith("b3ef8ecba8d550b4")


async def test_embedding_never_has_the_key_of_an_image(bench: Bench) -> None:
    """Not even one whose bytes are those of the file."""
    prepared = await bench.prepare("\x01", [embedded(FILE)])
    for encoded in (FILE, rows_of(2).tobytes()):
        key = item_key(settings_digest=b"fake settings", cache_salt="", encoded=encoded)
        assert prepared.items[0].key != key


def written(file: bytes, info: ModelInfo) -> npt.NDArray[np.uint8]:
    """Bytes of the served rows of an embedding."""
    embeds, plan = read_embedding(file, FakePreprocessor(info), MediaConfig())
    assert isinstance(plan, ImagePlan)
    rows = np.zeros(plan.tokens * info.embedding_row_bytes, np.uint8)
    write_rows(embeds, info.dtype, rows)
    return rows


@given(st.binary(max_size=200), st.integers(0, 90))
@settings(max_examples=50)
def test_any_bytes_are_read_or_refused(noise: bytes, place: int) -> None:
    file = bytearray(FILE)
    file[8 + place : 8 + place + len(noise)] = noise
    for hostile in (bytes(file), noise, framed(noise, b"")):
        with contextlib.suppress(RequestRefused):
            assert len(written(hostile, model_info())) <= 64 * 8 * 4


def as_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def served(rows: npt.NDArray[np.float32], dtype: str) -> tuple[npt.NDArray[Any], str]:
    """Convert rows to a served dtype; return them with its name in files."""
    if dtype == "float16":
        return rows.astype(np.float16), "F16"
    return (as_bfloat16(rows), "BF16") if dtype == "bfloat16" else (rows, "F32")


@each_case(
    ("dtype", "given_as"),
    [("float16", "float32"), *((one, one) for one in ("float32", "float16", "bfloat16"))],
)
def test_write_rows_copies_the_served_dtype_and_converts_float32(dtype: str, given_as: str) -> None:
    rows, kind = served(rows_of(2) * 1000, given_as)
    found = written(embedding_file(rows, embeds=kind), model_info(dtype=dtype))
    assert found.tobytes() == served(rows_of(2) * 1000, dtype)[0].tobytes()


@given(
    st.lists(
        st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False), min_size=16, max_size=16
    )
)
@settings(max_examples=30)
def test_write_rows_rounds_to_the_nearest_bfloat16(values: list[float]) -> None:
    rows = np.array(values, np.float32).reshape(2, 8)
    info = model_info(dtype="bfloat16")
    found = written(embedding_file(rows), info).view(np.uint16)
    for value, bits in zip(rows.reshape(-1), found, strict=True):
        below = int(np.float32(value).view(np.uint32)) >> 16
        widened = {near: np.uint32(near << 16).view(np.float32) for near in (below, below + 1)}
        best = min(widened, key=lambda near: (abs(float(widened[near]) - float(value)), near & 1))
        assert int(bits) == best


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
            written(embedding_file(converted, embeds=kind), info)
        assert caught.value.code == "embeds_not_finite"
    if given_as != dtype:
        rows = rows_of(2)
        rows[0, 0] = {"float16": -65520.0, "bfloat16": -3.4e38}[dtype]
        beyond = f"beyond {dtype}, limit finite numbers of {dtype}"
        with pytest.raises(RequestRefused, match=beyond):
            written(embedding_file(rows), info)


def test_write_rows_looks_at_every_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.media.embeddings._STRIP_VALUES", 5)
    info = model_info(dtype="bfloat16")
    rows = rows_of(2)
    whole = written(embedding_file(rows), info)
    assert (whole.view(np.uint16) - as_bfloat16(rows).reshape(-1) <= 1).all()
    rows[1, 7] = math.inf
    with pytest.raises(RequestRefused):
        written(embedding_file(rows), info)


def test_embedded_image_is_never_shown() -> None:
    """Neither a log nor an error holds the client's data."""
    reference = MediaReference("AAAA", is_embedded=True)
    assert "AAAA" not in repr(reference) + str([reference])
