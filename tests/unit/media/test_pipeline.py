from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.patience import PATIENCE_S, patience, until
from tests.unit.media.fakes import FakePreprocessor, data_url, image_bytes, model_info
from vsched.config import MediaConfig
from vsched.errors import RequestFailed, RequestRefused
from vsched.media import MediaPipeline, MediaReference, PixelStore
from vsched.media.keys import item_key

ITEM_BYTES = 8 * 48 * 4  # a 16x8 image: 2 tokens, 8 patches


class Bench:
    """A pipeline and its parts."""

    def __init__(self, preprocessor: FakePreprocessor, settings: MediaConfig, items: int) -> None:
        self.preprocessor = preprocessor
        self.store = PixelStore(memoryview(bytearray(items * ITEM_BYTES)))
        self.pipeline = MediaPipeline(preprocessor, self.store, settings)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(FakePreprocessor(), MediaConfig(), items=8)
    yield bench
    bench.preprocessor.gate.set()
    bench.pipeline.close()


async def entered(bench: Bench) -> None:
    """Wait until a thread is inside the image processor."""
    assert await asyncio.to_thread(bench.preprocessor.entered.wait, PATIENCE_S)


async def settled(bench: Bench) -> None:
    """Wait until the thread's own holds are back."""
    await until(lambda: bench.store.statistics().bytes_held == 0)


async def test_prepare_text_only_has_no_items(bench: Bench) -> None:
    """No multimodal inputs at all."""
    prepared = await bench.pipeline.prepare("hi", [])
    assert prepared.token_ids == [104, 105]
    assert prepared.items == ()
    prepared.lease.release()
    assert (await bench.pipeline.prepare([5, 6], [])).token_ids == [5, 6]
    assert len((await bench.pipeline.prepare("x" * 900, [])).token_ids) == 900


async def test_prepare_refuses_images_if_the_model_takes_none(bench: Bench) -> None:
    """Before anything is fetched or counted."""
    bench.preprocessor.info = model_info().text_alone
    with pytest.raises(RequestRefused, match="takes no images. Remedy: ") as caught:
        await bench.pipeline.prepare("a\x01", ["no url at all"])
    assert (caught.value.code, caught.value.status) == ("images_not_taken", 400)
    prepared = await bench.pipeline.prepare("hi", [])
    prepared.lease.release()


async def test_prepare_yields_items_and_pixels(bench: Bench) -> None:
    images = [data_url(image_bytes(value=9)), data_url(image_bytes(8, 24, value=4))]
    prepared = await bench.pipeline.prepare("a\x01b\x01", images)
    assert prepared.token_ids == [97, 1, 1, 98, 1, 1, 1]
    assert [(item.offset, item.tokens, item.metadata) for item in prepared.items] == [
        (1, 2, b"(1, 2, 4)"),
        (4, 3, b"(1, 6, 2)"),
    ]
    for item, value in zip(prepared.items, (9.0, 4.0), strict=True):
        assert item.extent is not None
        assert item.extent.size == item.tokens * 4 * 48 * 4
        assert set(bench.store.view(item.extent).view(np.float32).tolist()) == {value}
        assert len(item.key) == 32
    prepared.lease.release()
    assert bench.store.statistics().bytes_held == 0


async def test_repeated_image_costs_no_processing_until_it_is_evicted(bench: Bench) -> None:
    """One item's content is the key, within a request and across requests."""
    image = data_url(image_bytes())
    first = await bench.pipeline.prepare("\x01\x01", [image, image])
    assert bench.preprocessor.processed == 1
    assert first.items[0].extent == first.items[1].extent
    first.lease.release()
    second = await bench.pipeline.prepare("\x01", [image])
    assert bench.preprocessor.processed == 1
    assert second.items[0].key == first.items[0].key
    assert bench.pipeline.statistics().repeated == 1
    second.lease.release()
    assert bench.pipeline.clear() == ITEM_BYTES
    (await bench.pipeline.prepare("\x01", [image])).lease.release()
    assert bench.preprocessor.processed == 2


async def test_concurrent_requests_share_the_processing(bench: Bench) -> None:
    bench.preprocessor.gate.clear()
    image = data_url(image_bytes())
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(bench.pipeline.prepare("\x01", [image])) for _ in range(5)]
        await entered(bench)
        bench.preprocessor.gate.set()
    assert bench.preprocessor.processed == 1
    for task in tasks:
        task.result().lease.release()
    assert bench.store.statistics().bytes_held == 0


def test_item_key_separates_every_part() -> None:
    """Full width, typed and length-framed; tenants and settings never share."""
    parts = [
        {"settings_digest": b"s", "cache_salt": "", "encoded": b"ab"},
        {"settings_digest": b"sa", "cache_salt": "", "encoded": b"b"},
        {"settings_digest": b"s", "cache_salt": "a", "encoded": b"b"},
        {"settings_digest": b"", "cache_salt": "s", "encoded": b"ab"},
        {"settings_digest": b"", "cache_salt": "", "encoded": b"sab"},
    ]
    keys = {item_key(**part) for part in parts}  # type: ignore[arg-type]
    assert len(keys) == len(parts)
    assert {len(key) for key in keys} == {32}
    stable = item_key(settings_digest=b"s", cache_salt="t", encoded=b"i").hex()
    assert stable.startswith("a080f607e53f79ef"), (
        "keys are equal across processes, hosts and releases"
    )


async def test_salt_separates_tenants(bench: Bench) -> None:
    image = data_url(image_bytes())
    first = await bench.pipeline.prepare("\x01", [image], "tenant a")
    second = await bench.pipeline.prepare("\x01", [image], "tenant b")
    assert first.items[0].key != second.items[0].key
    assert bench.preprocessor.processed == 2


async def test_image_over_the_token_budget_is_refused() -> None:
    """Index, tokens, limit and remedy, before any pixel is decoded."""
    bench = Bench(FakePreprocessor(model_info(item_tokens_max=2)), MediaConfig(), items=8)
    images = [data_url(image_bytes()), data_url(image_bytes(24, 8))]
    with pytest.raises(RequestRefused, match=r"image 1: .*value 3 tokens, limit 2 tokens. Remedy"):
        await bench.pipeline.prepare("\x01\x01", images)
    assert bench.preprocessor.processed == 0
    bench.pipeline.close()


@pytest.mark.parametrize(
    ("prompt", "images", "text"),
    [
        ("\x01", ["data:image/png;base64,AAAA"], "image 0: the image cannot be decoded"),
        ("\x01", [data_url(image_bytes(2010, 10))], "image 0: the aspect ratio"),
        ("x", [data_url(image_bytes())], "placeholders"),
        ("\x01", [], "placeholders"),
        ("\x01", ["http://127.0.0.1/x"], "image 0: remote images are switched off"),
        ("x" * 1000, [], "no room for an answer: value 1000 prompt tokens, limit 1000"),
        ("x" * 9000, [], "no room for an answer"),
        ("\x01" * 65, ["x"] * 65, "value 65 images, limit 64 images"),
    ],
)
async def test_prepare_refuses_and_keeps_nothing(
    bench: Bench, prompt: str, images: list[str], text: str
) -> None:
    with pytest.raises(RequestRefused, match=text):
        await bench.pipeline.prepare(prompt, images)
    statistics = bench.pipeline.statistics()
    assert (statistics.preparing, statistics.preparing_bytes, statistics.refused) == (0, 0, 1)
    assert statistics.pixels.bytes_held == 0


async def test_processor_failure_fails_the_request(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets no details; the pool goes on."""
    bench.preprocessor.error = OSError("/secret/path")
    with pytest.raises(RequestFailed) as caught:
        await bench.pipeline.prepare("\x01", [data_url(image_bytes())])
    assert "secret" not in caught.value.message
    assert "/secret/path" in caplog.text
    await settled(bench)
    bench.preprocessor.error = None
    (await bench.pipeline.prepare("\x01", [data_url(image_bytes())])).lease.release()


async def test_wrong_shape_fails_and_is_never_trimmed(bench: Bench) -> None:
    """Expected and actual shape in the error."""
    bench.preprocessor.rows_missing = 1
    with pytest.raises(RequestFailed, match=r"pixels float32 \[7, 48\], but planned .* \[8, 48\]"):
        await bench.pipeline.prepare("\x01", [data_url(image_bytes())])
    await settled(bench)
    assert bench.store.statistics().entries == 0


async def test_one_of_two_sharers_cancelled_leaves_the_other(bench: Bench) -> None:
    bench.preprocessor.gate.clear()
    image = data_url(image_bytes())
    first = asyncio.ensure_future(bench.pipeline.prepare("\x01", [image]))
    await entered(bench)
    second = asyncio.ensure_future(bench.pipeline.prepare("\x01", [image]))
    await until(lambda: bench.pipeline.statistics().repeated == 1)
    first.cancel()
    await asyncio.sleep(0)
    bench.preprocessor.gate.set()
    (await second).lease.release()
    assert first.cancelled()
    assert bench.preprocessor.processed == 1


async def test_waits_for_space_and_goes_on() -> None:
    bench = Bench(FakePreprocessor(), MediaConfig(), items=1)
    first = await bench.pipeline.prepare("\x01", [data_url(image_bytes(value=1))])
    second = asyncio.ensure_future(bench.pipeline.prepare("\x01", [data_url(image_bytes(value=2))]))
    await until(lambda: bench.store.statistics().waiting == 1)
    first.lease.release()
    (await second).lease.release()
    with pytest.raises(RequestRefused, match="pixel space"):
        await bench.pipeline.prepare(
            "\x01\x01", [data_url(image_bytes(value=1)), data_url(image_bytes(value=2))]
        )
    bench.pipeline.close()


async def test_deadline_is_a_503_that_keeps_nothing() -> None:
    """Every wait has a deadline."""
    bench = Bench(FakePreprocessor(), MediaConfig(), items=1)
    held = await bench.pipeline.prepare("\x01", [data_url(image_bytes(value=1))])
    bench.pipeline._settings = MediaConfig(prepare_s=0.02)
    with pytest.raises(RequestRefused, match=r"limit 0\.02 s.*media\.prepare_s") as caught:
        await bench.pipeline.prepare("\x01", [data_url(image_bytes(value=2))])
    assert (caught.value.status, caught.value.retry_after_s) == (503, 5)
    held.lease.release()
    assert bench.store.statistics().bytes_held == 0
    assert bench.store.statistics().waiting == 0
    bench.pipeline.close()


@pytest.mark.parametrize("slow", ["render", "tokenize"])
@pytest.mark.parametrize("images", [0, 1])
async def test_deadline_holds_for_the_text_as_well(
    slow: str, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template or a tokenizer that takes long is a 503, and its thread keeps nothing when it is done."""
    gate, done = threading.Event(), threading.Event()

    def wait(text: str = "x" * 5000, **_: bool) -> Any:
        assert gate.wait(PATIENCE_S)
        done.set()
        return text if slow == "render" else [1, 2]

    bench = Bench(FakePreprocessor(), MediaConfig(prepare_s=0.02), items=1)
    urls = [data_url(image_bytes())] * images
    if slow == "tokenize":
        monkeypatch.setattr(bench.preprocessor, "tokenize", wait)
    with pytest.raises(RequestRefused, match=r"limit 0\.02 s.*media\.prepare_s") as caught:
        await bench.pipeline.prepare(wait if slow == "render" else "x" * 5000, urls)
    assert caught.value.status == 503
    assert bench.pipeline.statistics().preparing == 0
    gate.set()
    await until(done.is_set)
    await until(lambda: bench.pipeline.statistics().preparing_bytes == 0)
    assert bench.store.statistics().bytes_held == 0
    bench.pipeline.close()


async def test_long_texts_take_one_core_and_nothing_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are tokenized one after the other, in a thread that yields, while images and short texts go on."""
    gate, inside, most = threading.Event(), [0], [0]
    nice: list[int] = []

    def tokenize(text: str, **_: bool) -> list[int]:
        if len(text) < 5000:
            return list(map(ord, text))
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert gate.wait(PATIENCE_S)
        inside[0] -= 1
        return [7, 8]

    bench = Bench(FakePreprocessor(), MediaConfig(), items=1)
    monkeypatch.setattr(bench.preprocessor, "tokenize", tokenize)
    long = [asyncio.create_task(bench.pipeline.prepare("x" * 5000, [])) for _ in range(4)]
    await until(lambda: inside[0] == 1)
    async with patience():
        assert (await bench.pipeline.prepare("y", [])).token_ids == [121]
        with_image = await bench.pipeline.prepare(chr(1), [data_url(image_bytes())])
    with_image.lease.release()
    gate.set()
    assert [(await task).token_ids for task in long] == [[7, 8]] * 4
    assert most == [1]
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert min(nice) > min(own, 18)
    bench.pipeline.close()


@pytest.mark.parametrize(
    "settings", [MediaConfig(preparing_max=1), MediaConfig(preparing_bytes_max=200)]
)
async def test_too_many_in_preparation_is_a_429(settings: MediaConfig) -> None:
    """Bounded in count and in bytes, with Retry-After."""
    bench = Bench(FakePreprocessor(), settings, items=8)
    bench.preprocessor.gate.clear()
    image = data_url(image_bytes())
    first = asyncio.ensure_future(bench.pipeline.prepare("\x01", [image]))
    await entered(bench)
    with pytest.raises(RequestRefused) as caught:
        await bench.pipeline.prepare("\x01", [image])
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    bench.preprocessor.gate.set()
    (await first).lease.release()
    (await bench.pipeline.prepare("\x01", [image])).lease.release()
    bench.pipeline.close()


async def test_bytes_of_one_request_are_bounded() -> None:
    """Images and bytes per request."""
    size = len(image_bytes(value=1)) + len(image_bytes(value=2)) - 1
    bench = Bench(FakePreprocessor(), MediaConfig(request_bytes_max=size), items=8)
    images = [data_url(image_bytes(value=1)), data_url(image_bytes(value=2))]
    with pytest.raises(RequestRefused, match="image 1: the images of this request") as caught:
        await bench.pipeline.prepare("\x01\x01", images)
    assert caught.value.status == 413
    bench.pipeline.close()


async def test_memo_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.media.pipeline.PLANS_MAX", 2)
    bench = Bench(FakePreprocessor(), MediaConfig(), items=8)
    for value in range(4):
        image = data_url(image_bytes(value=value))
        (await bench.pipeline.prepare("\x01", [image])).lease.release()
    assert len(bench.pipeline._plans) == 2
    bench.pipeline.close()


async def test_image_is_found_by_its_name_once_it_was_sent(bench: Bench) -> None:
    """Nothing is decoded again, and it is the same item."""
    image = data_url(image_bytes())
    first = await bench.pipeline.prepare("\x01", [MediaReference(image, uuid="cat")])
    first.lease.release()
    again = await bench.pipeline.prepare("a\x01", [MediaReference(uuid="cat")])
    assert bench.preprocessor.processed == 1
    assert (again.items[0].key, again.items[0].tokens) == (first.items[0].key, 2)
    assert again.items[0].extent == first.items[0].extent
    again.lease.release()
    other = await bench.pipeline.prepare(
        "\x01", [MediaReference(data_url(image_bytes(value=3)), uuid="cat")]
    )
    assert other.items[0].key != first.items[0].key, "sent bytes count"
    other.lease.release()
    latest = await bench.pipeline.prepare("\x01", [MediaReference(uuid="cat")])
    assert latest.items[0].key == other.items[0].key
    latest.lease.release()


async def test_image_by_a_name_that_stands_for_none_is_refused(bench: Bench) -> None:
    """Never sent, sent by another tenant, or dropped; the message names the image and the remedy."""
    url = data_url(image_bytes())
    (await bench.pipeline.prepare("\x01", [MediaReference(url, uuid="cat")], "one")).lease.release()

    async def refused(name: str, salt: str) -> None:
        with pytest.raises(
            RequestRefused, match="image 1: .*Remedy: send the image again"
        ) as caught:
            await bench.pipeline.prepare("\x01a\x01", [url, MediaReference(uuid=name)], salt)
        assert (caught.value.code, caught.value.status) == ("image_unknown", 400)

    await refused("dog", "one")
    await refused("cat", "other")
    await refused("cat", "")
    (await bench.pipeline.prepare("\x01", [MediaReference(uuid="cat")], "one")).lease.release()
    bench.pipeline.clear()
    await refused("cat", "one")
    # The name and the plan are remembered longer than the pixels, for which others need the space.
    (await bench.pipeline.prepare("\x01", [MediaReference(url, uuid="cat")], "one")).lease.release()
    for value in range(20, 28):
        other = data_url(image_bytes(value=value))
        (await bench.pipeline.prepare("\x01", [other])).lease.release()
    with pytest.raises(RequestRefused, match="image 0: no image is kept under this uuid"):
        await bench.pipeline.prepare("\x01", [MediaReference(uuid="cat")], "one")
    await settled(bench)


async def test_image_by_its_name_joins_the_processing_of_the_one_that_was_sent(
    bench: Bench,
) -> None:
    bench.preprocessor.gate.clear()
    named = MediaReference(data_url(image_bytes()), uuid="cat")
    async with asyncio.TaskGroup() as group:
        first = group.create_task(bench.pipeline.prepare("\x01", [named]))
        await entered(bench)
        second = group.create_task(bench.pipeline.prepare("\x01", [MediaReference(uuid="cat")]))
        await asyncio.to_thread(lambda: None)
        bench.preprocessor.gate.set()
    assert bench.preprocessor.processed == 1
    for task in (first, second):
        task.result().lease.release()
