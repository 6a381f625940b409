"""Embeddings through the pipeline: mixed with images, bounded, shared, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.each_case import each_case
from tests.patience import PATIENCE_S, patience, until
from tests.unit.media.fakes import (
    VIDEO_PLACEHOLDER,
    FakePreprocessor,
    data_url,
    embedded,
    embedded_video,
    embedding_file,
    image_bytes,
    model_info,
    rows_of,
    tensor_of,
    tensors_file,
    video_embedding_file,
)
from vsched import Config, Engine
from vsched.config import MediaConfig
from vsched.engine import RunningParts
from vsched.errors import RequestRefused
from vsched.media import ImageReference, MediaPipeline, MediaReference, PixelStore
from vsched.media.fetch import Reserve
from vsched.media.formats import IMAGE_EMBEDDING, VIDEO_EMBEDDING, MediaKind
from vsched.media.keys import embedding_key, item_key
from vsched.types import MediaItem

ALLOWED = MediaConfig(allow_embeddings=True)


class Bench:
    """A pipeline and its parts."""

    def __init__(
        self, settings: MediaConfig = ALLOWED, *, remote: Mapping[str, bytes] = {}, **info: object
    ) -> None:
        self.preprocessor = FakePreprocessor(model_info(**info))  # type: ignore[arg-type]
        self.store = PixelStore(memoryview(bytearray(1 << 16)))

        async def read(url: str, _: MediaConfig, reserve: Reserve, kind: MediaKind) -> bytes:
            assert kind in (IMAGE_EMBEDDING, VIDEO_EMBEDDING)
            reserve(len(remote[url]))
            return remote[url]

        self.pipeline = MediaPipeline(self.preprocessor, self.store, settings, read_remote=read)

    def rows(self, item: MediaItem) -> bytes:
        assert item.extent is not None
        return self.store.view(item.extent).tobytes()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.pipeline.close()


async def refusal(bench: Bench, prompt: str, *images: ImageReference) -> RequestRefused:
    """Return the error of a refused request, which must leave nothing behind."""
    with pytest.raises(RequestRefused) as caught:
        await bench.pipeline.prepare(prompt, images)
    await until(lambda: not bench.store.statistics().bytes_held)
    assert bench.pipeline.statistics().preparing_bytes == 0
    return caught.value


async def test_embeddings_mix_with_images_in_order(bench: Bench) -> None:
    """Rows in the arena, placeholders expanded, the encoder's work marked as done."""
    rows = rows_of(6)
    brought = embedded(embedding_file(rows, (1, 4, 6)))
    first, last = data_url(image_bytes(value=9)), data_url(image_bytes(8, 24, value=4))
    images: list[ImageReference] = [first, brought, last]
    prepared = await bench.pipeline.prepare("a\x01b\x01c\x01", images)
    assert prepared.token_ids == [97, 1, 1, 98, *[1] * 6, 99, 1, 1, 1]
    assert [(one.offset, one.tokens, one.metadata, one.encoded) for one in prepared.items] == [
        (1, 2, b"(1, 2, 4)", False),
        (4, 6, b"(1, 4, 6)", True),
        (11, 3, b"(1, 6, 2)", False),
    ]
    assert bench.rows(prepared.items[1]) == rows.tobytes()
    assert set(np.frombuffer(bench.rows(prepared.items[2]), np.float32)) == {4.0}
    statistics = bench.pipeline.statistics()
    assert (statistics.processed, statistics.embedded) == (2, 1)
    prepared.lease.release()
    assert bench.store.statistics().bytes_held == 0


async def test_embeddings_of_a_video_are_items_of_frame_groups() -> None:
    """Rows, metadata and placeholders of each group; equal groups have one key and extent, in any request."""
    bench = Bench(video_token_id=VIDEO_PLACEHOLDER)
    rows = rows_of(8)
    rows[4:6] = rows[0:2]
    file = video_embedding_file(rows, (4, 2, 4), (0.5, 1.5, 2.5, 3.5))
    image = data_url(image_bytes())
    prepared = await bench.pipeline.prepare("\x01a\x02b", [image, embedded_video(file)])
    assert prepared.token_ids == [1, 1, 97, *[50, 2, 2] * 4, 98]
    groups = prepared.items[1:]
    assert [(one.offset, one.tokens, one.metadata, one.encoded) for one in groups] == [
        (4, 2, b"0.5", True),
        (7, 2, b"1.5", True),
        (10, 2, b"2.5", True),
        (13, 2, b"3.5", True),
    ]
    assert b"".join(map(bench.rows, groups)) == rows.tobytes()
    assert groups[0].key == groups[2].key
    assert len({item.key for item in prepared.items}) == len(prepared.lease.extents) == 4
    longer = np.concatenate([rows, rows_of(2, seed=1)])
    file = video_embedding_file(longer, (5, 2, 4), [0.0, 1.0, 2.0, 3.0, 4.0])
    extended = await bench.pipeline.prepare("\x02", [embedded_video(file)])
    assert [one.key for one in extended.items[:4]] == [one.key for one in groups]
    assert extended.items[0].extent == groups[0].extent
    other = await bench.pipeline.prepare("\x02", [embedded_video(file)], "tenant")
    assert not {one.key for one in other.items} & {one.key for one in extended.items}
    for each in (prepared, extended, other):
        each.lease.release()
    assert bench.store.statistics().bytes_held == 0
    bench.pipeline.close()


VIDEO = {
    "embeds": tensor_of(rows_of(4)),
    "grid_thw": tensor_of(np.array([2, 2, 4])),
    "timestamps": tensor_of(np.array([0.5, 1.5])),
}


@each_case(
    ("changed", "code", "text"),
    [
        ({"timestamps": None}, "timestamps_missing", "come without timestamps. Remedy: add"),
        ({"timestamps": tensor_of(np.array([1, 2]))}, "timestamps_dtype", "value I64, limit F64"),
        ({"timestamps": tensor_of(np.array([0, 1e9]))}, "timestamps_invalid", "0 to 3600 seconds"),
        ({"timestamps": tensor_of(np.array([0, -1.0]))}, "timestamps_invalid", "value -1.0"),
        ({"timestamps": tensor_of(np.array([0, np.nan]))}, "timestamps_invalid", "value nan"),
        ({"embeds": tensor_of(rows_of(5))}, "embeds_tokens", r"expected shape \[4, 8\]"),
        ({"embeds": tensor_of(rows_of(4) * np.float32("nan"))}, "embeds_not_finite", "NaN"),
        ({"more": tensor_of(rows_of(1))}, "embeddings_invalid", "another tensor"),
    ],
)
async def test_bad_embedding_of_a_video_is_refused(
    changed: dict[str, Any], code: str, text: str
) -> None:
    """Each is the client's error, with a remedy; nothing is kept."""
    bench = Bench(video_token_id=VIDEO_PLACEHOLDER)
    tensors = {name: each for name, each in (VIDEO | changed).items() if each is not None}
    error = await refusal(bench, "\x02", embedded_video(tensors_file(tensors)))
    assert (error.code, error.status) == (code, 400)
    assert error.message.startswith("video 0: ")
    assert "Remedy: " in error.message
    assert re.search(text, error.message)
    whole = tensors_file(VIDEO)
    for file in (whole[:-1], whole[:50], b"\xff" * 64):
        error = await refusal(bench, "\x02", embedded_video(file))
        assert (error.code, error.status) == ("embeddings_invalid", 400)
    bench.pipeline.close()


async def test_embeddings_of_videos_need_a_model_that_takes_them() -> None:
    video = embedded_video(tensors_file(VIDEO))
    bench = Bench()
    assert (await refusal(bench, "\x02", video)).code == "videos_not_taken"
    bench.pipeline.close()
    bench = Bench(video_token_id=VIDEO_PLACEHOLDER)
    bench.preprocessor.video_times = ""
    assert (await refusal(bench, "\x02", video)).code == "embeddings_not_taken"
    bench.pipeline.close()
    bench = Bench(MediaConfig(allow_embeddings=True, videos_max=1), video_token_id=2)
    assert (await refusal(bench, "\x02\x02", video, video)).code == "too_many_videos"
    bench.pipeline.close()


async def test_embeddings_by_reference(tmp_path: Path) -> None:
    """A file of the allowed folder, of an allowed host, or a data: URL has the key of its base64."""
    (folder := tmp_path / "allowed").mkdir()
    image, video = embedding_file(), tensors_file(VIDEO)
    files = {"image": image, "video": video}
    for name, file in files.items():
        (folder / name).write_bytes(file)
    (tmp_path / "outside").write_bytes(image)
    (folder / "link").symlink_to(tmp_path / "outside")
    settings = MediaConfig(allow_embeddings=True, directory=str(folder))
    remote = {f"https://host/{name}": file for name, file in files.items()}
    bench = Bench(settings, remote=remote, video_token_id=VIDEO_PLACEHOLDER)
    keys = set()
    for source_of in (
        lambda file, _: base64.b64encode(file).decode(),
        lambda _, name: f"file://{folder}/{name}",
        lambda _, name: f"https://host/{name}",
        lambda file, _: data_url(file, "application/octet-stream"),
    ):
        sources = [source_of(file, name) for name, file in files.items()]
        references: list[ImageReference]
        references = [
            MediaReference(sources[0], is_embedded=True),
            MediaReference(sources[1], is_video=True, is_embedded=True),
        ]
        prepared = await bench.pipeline.prepare("\x01\x02", references)
        keys.add(tuple(item.key for item in prepared.items))
        prepared.lease.release()
    assert len(keys) == 1
    for url in (f"file://{folder}/link", f"file://{folder}/none", f"file://{folder}/../outside"):
        for reference in (
            MediaReference(url, is_embedded=True),
            MediaReference(url, is_video=True, is_embedded=True),
        ):
            error = await refusal(bench, "\x01", reference)
            assert (error.code, error.status) == ("embedding_file_refused", 400)
    wrong = MediaReference(data_url(image, "image/png"), is_embedded=True)
    assert (await refusal(bench, "\x01", wrong)).code == "embedding_type_unsupported"
    (folder / "image").write_bytes(image.ljust(settings.image_bytes_max + 1))
    error = await refusal(bench, "\x01", MediaReference(f"file://{folder}/image", is_embedded=True))
    assert (error.code, error.status) == ("embedding_too_large", 413)
    assert "media.image_bytes_max" in error.message
    bench.pipeline.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_extent_has_the_bytes_of_the_served_rows(dtype: str) -> None:
    bench = Bench(dtype=dtype, embedding_levels=3)
    prepared = await bench.pipeline.prepare("\x01", [embedded(embedding_file(rows_of(2, 24)))])
    assert prepared.items[0].extent is not None
    assert prepared.items[0].extent.size == 2 * 24 * 2
    bench.pipeline.close()


async def test_repeated_embedding_is_written_once(bench: Bench) -> None:
    brought = embedded(embedding_file())
    first = await bench.pipeline.prepare("\x01\x01", [brought, brought])
    again = await bench.pipeline.prepare("\x01", [embedded(embedding_file())])
    assert first.items[0].extent == first.items[1].extent == again.items[0].extent
    statistics = bench.pipeline.statistics()
    assert (statistics.embedded, statistics.repeated) == (1, 1)
    assert not bench.pipeline._plans


async def test_switch_refuses_with_its_name() -> None:
    """Off by default: refused before anything is decoded or fetched."""
    assert not MediaConfig().allow_embeddings
    bench = Bench(MediaConfig(hosts=("host.invalid",)))
    error = await refusal(
        bench, "\x01\x01", "http://host.invalid/x", MediaReference("?", is_embedded=True)
    )
    assert error.code == "embeddings_disabled"
    assert error.message.startswith("image 1: embeddings in requests are switched off")
    assert "Remedy: send the image itself or set media.allow_embeddings = true" in error.message
    bench.pipeline.close()


@pytest.mark.parametrize(
    ("brought", "code", "text"),
    [
        (MediaReference("???", is_embedded=True), "embeddings_invalid", "its base64 is not valid"),
        (MediaReference("AAA==", is_embedded=True), "embeddings_invalid", "its base64"),
        (MediaReference("AA===", is_embedded=True), "embeddings_invalid", "its base64"),
        (MediaReference("AA\nA", is_embedded=True), "embeddings_invalid", "ends within its header"),
        (
            MediaReference("\ud800", is_embedded=True),
            "embeddings_invalid",
            "its base64 is not valid",
        ),
        (MediaReference("", is_embedded=True), "embeddings_invalid", "its base64 is not valid"),
        (
            embedded(embedding_file(rows_of(2) * np.float32("inf"))),
            "embeds_not_finite",
            "cannot be served",
        ),
    ],
)
async def test_bad_embedding_fails_its_request_alone(
    bench: Bench, brought: MediaReference, code: str, text: str
) -> None:
    """The error has index and code; the other request is not affected."""
    beside = asyncio.ensure_future(bench.pipeline.prepare("\x01", [data_url(image_bytes())]))
    await asyncio.sleep(0)
    with pytest.raises(RequestRefused, match=text) as caught:
        await bench.pipeline.prepare("\x01\x01", [data_url(image_bytes()), brought])
    assert (caught.value.code, caught.value.status) == (code, 400)
    assert caught.value.message.startswith("image 1: ")
    (await beside).lease.release()
    assert (await refusal(bench, "\x01", brought)).code == code


async def test_embeddings_count_towards_every_bound() -> None:
    """Images per request, bytes per request, bytes in preparation."""
    file = embedding_file()
    bench = Bench(MediaConfig(allow_embeddings=True, images_max=1))
    assert (await refusal(bench, "\x01", *[embedded(file)] * 2)).code == "too_many_images"
    bench.pipeline.close()
    bench = Bench(MediaConfig(allow_embeddings=True, request_bytes_max=2 * len(file) - 1))
    files = [embedding_file(rows_of(2, seed=seed)) for seed in range(2)]
    error = await refusal(bench, "\x01\x01", *map(embedded, files))
    assert (error.code, error.status) == ("images_too_large", 413)
    bench.pipeline.close()


@pytest.mark.parametrize(("surplus", "accepted"), [(0, True), (1, False), (3, False)])
async def test_file_size_is_bounded_exactly(surplus: int, accepted: bool) -> None:
    file = embedding_file()
    bench = Bench(MediaConfig(allow_embeddings=True, image_bytes_max=len(file) - surplus))
    if accepted:
        (await bench.pipeline.prepare("\x01", [embedded(file)])).lease.release()
    else:
        error = await refusal(bench, "\x01", embedded(file))
        assert (error.code, error.status) == ("embedding_too_large", 413)
        assert f"limit {len(file) - surplus} bytes. Remedy: " in error.message
        assert "the encoded embedding is too large" in error.message
    bench.pipeline.close()


async def test_length_is_checked_before_base64(bench: Bench) -> None:
    """50 MB cost the memory of a few pieces."""
    brought = MediaReference("A" * 50_000_000, is_embedded=True)
    tracemalloc.start()
    try:
        assert (await refusal(bench, "\x01", brought)).status == 413
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
    file = embedding_file()
    prepared = await bench.pipeline.prepare("\x01", [embedded(file)])
    for encoded in (file, rows_of(2).tobytes()):
        key = item_key(settings_digest=b"fake settings", cache_salt="", encoded=encoded)
        assert prepared.items[0].key != key


class Stopping:
    """Stands for the parts of an engine that stop at once."""

    async def stop(self, *, grace_s: float) -> None:
        pass

    def close(self) -> None:
        pass


async def test_engine_stops_without_holding_the_loop_up() -> None:
    """Only `stop` waits for an image that is still being decoded."""
    engine = Engine(Config())
    bench = Bench()
    rest = cast("Any", Stopping())
    engine._running = RunningParts(
        arena=rest,
        launcher=rest,
        shell=rest,
        media=bench.pipeline,
        grammars=rest,
        tells_prompts=False,
        adapters=rest,
    )
    gate, entered = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert gate.wait(PATIENCE_S)

    bench.pipeline._executor.submit(work)
    assert await asyncio.to_thread(entered.wait, PATIENCE_S)
    stopping = asyncio.ensure_future(engine.stop())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not stopping.done()
    gate.set()
    async with patience():
        await stopping
    assert engine.statistics()["media"] == {}
    await engine.stop()
