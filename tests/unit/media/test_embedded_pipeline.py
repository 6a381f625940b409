"""Embeddings through the pipeline: mixed with images, bounded, shared, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.each_case import each_case
from tests.patience import patience
from tests.unit.media.fakes import (
    VIDEO_PLACEHOLDER,
    FakePreprocessor,
    data_url,
    embedded,
    embedding_file,
    image_bytes,
    model_info,
    rows_of,
    tensor_of,
    tensors_file,
)
from tests.unit.media.pipelines import Bench
from vsched import Config, Engine
from vsched.config import MediaConfig
from vsched.engine import RunningParts
from vsched.errors import RequestRefused
from vsched.media import MediaReference
from vsched.media.keys import embedding_key, item_key

IMAGE = data_url(image_bytes())


def bench_with(info: dict[str, Any] | None = None, **settings: Any) -> Bench:
    """Return a bench with embeddings allowed, of a model that takes videos."""
    made = model_info(**{"video_token_id": VIDEO_PLACEHOLDER, **(info or {})})
    return Bench(MediaConfig(**{"allow_embeddings": True, **settings}), FakePreprocessor(made))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with bench_with() as bench:
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
    await bench.all_back()


async def test_embeddings_of_a_video_are_items_of_frame_groups(bench: Bench) -> None:
    """Rows, metadata and placeholders of each group; equal groups have one key and extent, in any request."""
    rows = rows_of(8)
    rows[4:6] = rows[0:2]
    file = embedding_file(rows, (4, 2, 4), (0.5, 1.5, 2.5, 3.5))
    prepared = await bench.prepare("\x01a\x02b", [IMAGE, embedded(file, is_video=True)])
    assert prepared.token_ids == [1, 1, 97, *[50, 2, 2] * 4, 98]
    groups = prepared.items[1:]
    assert [(one.offset, one.tokens, one.metadata, one.encoded) for one in groups] == [
        (4, 2, b"0.5", True),
        (7, 2, b"1.5", True),
        (10, 2, b"2.5", True),
        (13, 2, b"3.5", True),
    ]
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
    await bench.all_back()


VIDEO = {
    "embeds": tensor_of(rows_of(4)),
    "grid_thw": tensor_of(np.array([2, 2, 4])),
    "timestamps": tensor_of(np.array([0.5, 1.5])),
}


def video_with(**changed: Any) -> MediaReference:
    tensors = {name: each for name, each in (VIDEO | changed).items() if each is not None}
    return embedded(tensors_file(tensors), is_video=True)


def times(*seconds: float) -> MediaReference:
    return video_with(timestamps=tensor_of(np.array(seconds)))


def base64_image(text: str) -> MediaReference:
    return MediaReference(text, is_embedded=True)


@each_case(
    ("brought", "code", "text"),
    [
        (video_with(timestamps=None), "timestamps_missing", "come without timestamps. Remedy: add"),
        (times(1, 2), "timestamps_dtype", "value I64, limit F64"),
        (times(0, 1e9), "timestamps_invalid", "0 to 3600 seconds"),
        (times(0, -1.0), "timestamps_invalid", "value -1.0"),
        (times(0, np.nan), "timestamps_invalid", "value nan"),
        (video_with(embeds=tensor_of(rows_of(5))), "embeds_tokens", r"expected shape \[4, 8\]"),
        (video_with(embeds=tensor_of(rows_of(4) * np.float32("nan"))), "embeds_not_finite", "NaN"),
        (video_with(more=tensor_of(rows_of(1))), "embeddings_invalid", "another tensor"),
        (embedded(tensors_file(VIDEO)[:-1], is_video=True), "embeddings_invalid", "malformed"),
        (base64_image("???"), "embeddings_invalid", "its base64 is not valid"),
        (base64_image("AAA=="), "embeddings_invalid", "its base64"),
        (base64_image("AA==="), "embeddings_invalid", "its base64"),
        (base64_image("AA\nA"), "embeddings_invalid", "ends within its header"),
        (base64_image("\ud800"), "embeddings_invalid", "its base64 is not valid"),
        (base64_image(""), "embeddings_invalid", "its base64 is not valid"),
        (
            embedded(embedding_file(rows_of(2) * np.float32("inf"))),
            "embeds_not_finite",
            "cannot be served",
        ),
    ],
)
async def test_bad_embedding_fails_its_request_alone(
    brought: MediaReference, code: str, text: str
) -> None:
    """The client's error, with index, code and remedy; another request is not affected, nothing is kept."""
    with bench_with() as bench:
        beside = bench.start("\x01", [data_url(image_bytes(value=5))])
        await asyncio.sleep(0)
        prompt = "\x01\x02" if brought.is_video else "\x01\x01"
        with pytest.raises(RequestRefused, match=text) as caught:
            await bench.prepare(prompt, [IMAGE, brought])
        assert (caught.value.code, caught.value.status) == (code, 400)
        assert caught.value.message.startswith(f"{brought.noun} 1: ")
        assert "Remedy: " in caught.value.message
        (await beside).lease.release()
        await bench.all_back()


FILE = embedding_file()
TWO = [embedded(FILE), embedded(embedding_file(rows_of(2, seed=1)))]
OFF = ["http://host.invalid/x", base64_image("?")]


@each_case(
    ("settings", "brought", "status", "code", "text"),
    [
        (
            {"allow_embeddings": False, "hosts": ("host.invalid",)},
            OFF,
            400,
            "embeddings_disabled",
            "image 1: .*Remedy: send the image itself or set media.allow_embeddings = true",
        ),
        ({"images_max": 1}, TWO, 400, "too_many_images", "limit 1 images"),
        ({"videos_max": 1}, [video_with()] * 2, 400, "too_many_videos", "limit 1 videos"),
        ({"request_bytes_max": 2 * len(FILE) - 1}, TWO, 413, "images_too_large", "image 1: "),
        (
            {"image_bytes_max": len(FILE) - 1},
            TWO,
            413,
            "embedding_too_large",
            f"the encoded embedding is too large: .*limit {len(FILE) - 1} bytes. Remedy: ",
        ),
        ({"image_bytes_max": len(FILE) - 3}, TWO, 413, "embedding_too_large", "Remedy: "),
    ],
)
async def test_embeddings_count_towards_every_bound(
    settings: dict[str, Any], brought: list[Any], status: int, code: str, text: str
) -> None:
    """Switched off by default; then they are refused before anything is fetched."""
    assert not MediaConfig().allow_embeddings
    with bench_with(**settings) as bench:
        error = await bench.refusal("\x01\x01", brought)
    assert (error.code, error.status) == (code, status)
    assert re.search(text, error.message)


async def test_embeddings_of_videos_need_a_model_that_takes_them(bench: Bench) -> None:
    bench.preprocessor.video_times = ""
    assert (await bench.refusal("\x02", [video_with()])).code == "embeddings_not_taken"
    with bench_with({"video_token_id": None}) as other:
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

    with Bench(settings, preprocessor, remote=remote) as bench:
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
async def test_extent_has_the_bytes_of_the_served_rows(dtype: str) -> None:
    with bench_with({"dtype": dtype, "embedding_levels": 3}) as bench:
        prepared = await bench.prepare("\x01", [embedded(embedding_file(rows_of(2, 24)))])
        assert bench.pixels(prepared.items[0]).nbytes == 2 * 24 * 2


async def test_length_is_checked_before_base64() -> None:
    """50 MB cost the memory of a few pieces; a file of exactly the limit is accepted."""
    with bench_with(image_bytes_max=len(FILE)) as bench:
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
        "settings_digest": b"s",
        "cache_salt": "",
        "served": ("float32", 8, 1),
        "dtype": "F32",
        "shape": (2, 8),
        "metadata": struct.pack("<3q", 1, 2, 4),
        "rows": memoryview(b"rows"),
    }
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


class Stopping:
    """Stands for the parts of an engine that stop at once."""

    async def stop(self, *, grace_s: float) -> None:
        pass

    def close(self) -> None:
        pass


async def test_engine_stops_without_holding_the_loop_up(bench: Bench) -> None:
    """Only `stop` waits for an image that is still being decoded."""
    engine = Engine(Config())
    rest = cast("Any", Stopping())
    engine._running = RunningParts(
        arena=rest,
        launcher=rest,
        shell=rest,
        media=bench.pipeline,
        grammars=rest,
        computes_prompt_logprobs=False,
        adapters=rest,
    )
    bench.preprocessor.gate.clear()
    decoding = bench.start("\x01", [IMAGE])
    await bench.entered()
    stopping = asyncio.ensure_future(engine.stop())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not stopping.done()
    bench.preprocessor.gate.set()
    async with patience():
        await stopping
    await decoding
    assert engine.statistics()["media"] == {}
    await engine.stop()
