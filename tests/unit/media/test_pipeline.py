from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from tests.each_case import each_case
from tests.patience import PATIENCE_S, patience, until
from tests.unit.media.fakes import FakePreprocessor, data_url, image_bytes, model_info
from tests.unit.media.pipelines import ITEM_BYTES, Bench
from tests.unit.media.test_sources import private, server
from vsched.config import Config, MediaConfig
from vsched.engine import Engine, RunningParts
from vsched.errors import RequestFailed, RequestRefused, VschedError
from vsched.media import MediaReference
from vsched.media.budget import HeldBytes, Holding
from vsched.media.keys import item_key

IMAGE = data_url(image_bytes())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with Bench(items=8) as bench:
        yield bench


async def test_prepare_text_only_has_no_items(bench: Bench) -> None:
    prepared = await bench.prepare("hi")
    assert (prepared.token_ids, prepared.items) == ([104, 105], ())
    assert (await bench.prepare([5, 6])).token_ids == [5, 6]
    assert len((await bench.prepare("x" * 900)).token_ids) == 900
    bench.preprocessor.info = model_info().text_alone
    error = await bench.refusal("a\x01", ["no url at all"])
    assert (error.code, error.status) == ("images_not_taken", 400)
    assert "takes no images. Remedy: " in error.message


async def test_repeated_image_costs_no_processing_until_it_is_evicted(bench: Bench) -> None:
    """One item's content is the key, within a request and across requests of a tenant."""
    first = await bench.prepare("\x01\x01", [IMAGE, IMAGE])
    assert bench.preprocessor.processed == 1
    assert first.items[0].extent == first.items[1].extent
    second = await bench.prepare("\x01", [IMAGE])
    assert bench.preprocessor.processed == 1
    assert second.items[0].key == first.items[0].key
    assert bench.pipeline.statistics().repeated == 1
    other = await bench.prepare("\x01", [IMAGE], "another tenant")
    assert other.items[0].key != first.items[0].key
    assert bench.preprocessor.processed == 2
    assert bench.pipeline.clear() == 2 * ITEM_BYTES
    await bench.prepare("\x01", [IMAGE])
    assert bench.preprocessor.processed == 3


async def test_concurrent_requests_share_a_processing_that_outlives_the_first(bench: Bench) -> None:
    """By content and by name; the request that began it may be cancelled."""
    first = await bench.stuck("\x01", [MediaReference(IMAGE, uuid="cat")])
    others = [bench.start("\x01", [each]) for each in (IMAGE, MediaReference(uuid="cat"), IMAGE)]
    await until(lambda: bench.pipeline.statistics().repeated == 3)
    first.cancel()
    await asyncio.sleep(0)
    bench.preprocessor.gate.set()
    await asyncio.gather(*others)
    assert first.cancelled()
    assert bench.preprocessor.processed == 1


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
    assert stable.startswith("a080f607e53f79ef"), "equal on all hosts, in all releases"


@each_case(
    ("prompt", "images", "text"),
    [
        ("\x01", ["data:image/png;base64,AAAA"], "image 0: the image cannot be decoded"),
        ("\x01", [data_url(image_bytes(2010, 10))], "image 0: the aspect ratio"),
        ("x", [IMAGE], "placeholders"),
        ("\x01", [], "placeholders"),
        ("\x01", ["http://127.0.0.1/x"], "image 0: remote images are switched off"),
        ("x" * 1000, [], "no room for an answer: value 1000 prompt tokens, limit 1000"),
        ("x" * 9000, [], "no room for an answer"),
        ("\x01" * 65, ["x"] * 65, "value 65 images, limit 64 images"),
        ("\x01\x01", [IMAGE, data_url(image_bytes(24, 8))],
         "image 1: .*value 3 tokens, limit 2 tokens. Remedy"),
    ],
)  # fmt: skip
async def test_prepare_refuses_and_keeps_nothing(prompt: str, images: list[str], text: str) -> None:
    """Index, value, limit and remedy, before any pixel is decoded."""
    async with Bench(preprocessor=FakePreprocessor(model_info(item_tokens_max=2))) as bench:
        error = await bench.refusal(prompt, images)
        assert re.search(text, error.message)
        assert bench.pipeline.statistics().refused == 1
        assert bench.preprocessor.processed == 0


async def test_bytes_of_one_request_are_bounded() -> None:
    first, second = image_bytes(value=1), image_bytes(value=2)
    async with Bench(MediaConfig(request_bytes_max=len(first) + len(second) - 1)) as bench:
        error = await bench.refusal("\x01\x01", [data_url(first), data_url(second)])
    assert error.message.startswith("image 1: the images of this request")
    assert error.status == 413


@each_case(
    ("image", "faults", "error", "text"),
    [
        (IMAGE, {"error": OSError("/secret/path")}, RequestFailed, "could not be processed"),
        (IMAGE, {"rows_missing": 1}, RequestFailed, r"float32 \[7, 48\], but planned .* \[8, 48\]"),
        (data_url(image_bytes(64, 64)[:-30]), {}, RequestRefused, "cannot be decoded"),
    ],
)
async def test_failing_image_fails_its_request_and_returns_its_memory(
    image: str,
    faults: dict[str, Any],
    error: type[VschedError],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client gets no details, a wrong shape is never trimmed, and the pool goes on."""
    async with Bench() as bench:
        vars(bench.preprocessor).update(faults)
        for _ in range(3):
            with pytest.raises(error, match=text) as caught:
                await bench.prepare("\x01", [image])
            assert "secret" not in str(caught.value)
            await bench.all_back()
        assert str(faults.get("error", "")) in caplog.text
        assert bench.store.statistics().entries == 0
        vars(bench.preprocessor).update(error=None, rows_missing=0)
        await bench.prepare("\x01", [IMAGE])


async def test_waits_for_space_and_goes_on() -> None:
    one, other = (data_url(image_bytes(value=value)) for value in (1, 2))
    async with Bench(items=1) as bench:
        first = await bench.pipeline.prepare("\x01", [one])
        second = bench.start("\x01", [other])
        await until(lambda: bench.store.statistics().waiting == 1)
        first.lease.release()
        await second
        assert "pixel space" in (await bench.refusal("\x01\x01", [one, other])).message


@pytest.mark.parametrize("slow", ["space", "render", "tokenize"])
async def test_missed_deadline_keeps_nothing(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait has a deadline: for space, a template or a tokenizer, whose thread keeps nothing when it is done."""
    gate = threading.Event()

    def wait(text: str = "x" * 5000, **_: bool) -> Any:
        assert gate.wait(PATIENCE_S)
        return text if slow == "render" else [1, 2]

    async with Bench(items=1) as bench:
        held = await bench.pipeline.prepare("\x01", [IMAGE])
        bench.pipeline._settings = MediaConfig(prepare_s=0.02)
        if slow == "tokenize":
            monkeypatch.setattr(bench.preprocessor, "tokenize", wait)
        images = [] if slow == "render" else [data_url(image_bytes(value=2))]
        prompt = {"space": "\x01", "tokenize": "x" * 5000}.get(slow, wait)
        with pytest.raises(RequestRefused, match=r"limit 0\.02 s.*media\.prepare_s") as caught:
            await bench.pipeline.prepare(prompt, images)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 5)
        assert bench.pipeline.statistics().preparing == 0
        gate.set()
        held.lease.release()


async def test_long_texts_take_one_core_and_delay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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

    async with Bench() as bench:
        monkeypatch.setattr(bench.preprocessor, "tokenize", tokenize)
        long = [bench.start("x" * 5000, []) for _ in range(4)]
        await until(lambda: inside[0] == 1)
        async with patience():
            assert (await bench.prepare("y")).token_ids == [121]
            await bench.prepare("\x01", [IMAGE])
        gate.set()
        assert [(await task).token_ids for task in long] == [[7, 8]] * 4
    assert most == [1]
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert min(nice) > min(own, 18)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        (MediaConfig(preparing_max=1), "limit 1"),
        (MediaConfig(preparing_bytes_max=50), r"value \d{3} bytes, limit 50 bytes"),
    ],
)
async def test_too_many_in_preparation_is_a_429(settings: MediaConfig, limit: str) -> None:
    """Bounded in count and in bytes, with Retry-After; a lone request has its own limits."""
    async with Bench(settings) as bench:
        first = await bench.stuck("\x01", [IMAGE])
        with pytest.raises(RequestRefused, match=limit) as caught:
            await bench.prepare("\x01", [IMAGE])
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        bench.preprocessor.gate.set()
        await first
        await bench.prepare("\x01", [IMAGE])


async def test_memo_of_plans_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.media.pipeline.PLANS_MAX", 2)
    for value in range(4):
        await bench.prepare("\x01", [data_url(image_bytes(value=value))])
    assert len(bench.pipeline._plans) == 2


async def test_image_is_found_by_its_name_once_it_was_sent(bench: Bench) -> None:
    """Nothing is decoded again, and it is the same item."""
    first = await bench.prepare("\x01", [MediaReference(IMAGE, uuid="cat")])
    again = await bench.prepare("a\x01", [MediaReference(uuid="cat")])
    assert bench.preprocessor.processed == 1
    assert (again.items[0].key, again.items[0].tokens) == (first.items[0].key, 2)
    assert again.items[0].extent == first.items[0].extent
    sent = MediaReference(data_url(image_bytes(value=3)), uuid="cat")
    other = await bench.prepare("\x01", [sent])
    assert other.items[0].key != first.items[0].key, "sent bytes count"
    latest = await bench.prepare("\x01", [MediaReference(uuid="cat")])
    assert latest.items[0].key == other.items[0].key


async def test_image_by_a_name_that_stands_for_none_is_refused(bench: Bench) -> None:
    """Never sent, sent by another tenant, or dropped; the message names the image and the remedy."""
    sent, named = MediaReference(IMAGE, uuid="cat"), MediaReference(uuid="cat")
    await bench.prepare("\x01", [sent], "one")

    async def refused(name: str, salt: str) -> None:
        error = await bench.refusal("\x01a\x01", [IMAGE, MediaReference(uuid=name)], salt)
        assert (error.code, error.status) == ("image_unknown", 400)
        assert re.match("image 1: .*Remedy: send the image again", error.message)

    await refused("dog", "one")
    await refused("cat", "other")
    await refused("cat", "")
    await bench.prepare("\x01", [named], "one")
    bench.pipeline.clear()
    await refused("cat", "one")
    # The name and the plan are remembered longer than the pixels, for which others need the space.
    await bench.prepare("\x01", [sent], "one")
    for value in range(20, 28):
        await bench.prepare("\x01", [data_url(image_bytes(value=value))])
    error = await bench.refusal("\x01", [named], "one")
    assert error.message.startswith("image 0: no image is kept under this uuid")


def test_held_bytes_may_reach_their_limit() -> None:
    held = HeldBytes(100)
    Holding(held).add(60)
    Holding(held).add(40)
    assert held.total == 100


async def held_while_processing(settings: MediaConfig, image: str) -> int:
    async with Bench(settings) as bench:
        task = await bench.stuck("\x01", [image])
        held = bench.pipeline.statistics().preparing_bytes
        bench.preprocessor.gate.set()
        await task
    return held


async def test_an_image_counts_as_sent_and_as_read(tmp_path: Path) -> None:
    """Files and fetched images, too."""
    content = image_bytes()
    (tmp_path / "a.png").write_bytes(content)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    async with server(head, content[:20], content[20:]) as (host, _):
        settings = private(host, directory=str(tmp_path))
        for url in (f"file://{tmp_path}/a.png", f"http://{host}/a.png"):
            assert await held_while_processing(settings, url) == len(url) + len(content)
    url = data_url(content)
    held = await held_while_processing(MediaConfig(), url)
    assert len(url) + len(content) <= held <= 1.75 * len(url)


async def test_fetch_stops_where_the_bytes_end() -> None:
    """Streamed bytes are counted as they arrive: the body here never ends by itself."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    async with (
        server(head, bytes(5000), pause=True) as (host, _),
        Bench(private(host, preparing_bytes_max=4000)) as bench,
    ):
        other = await bench.stuck("\x01", [data_url(image_bytes())])
        before = bench.pipeline.statistics().preparing_bytes
        with pytest.raises(RequestRefused, match="hold too many bytes.*limit 4000 bytes"):
            await bench.prepare("\x01", [f"http://{host}/a.png"])
        assert bench.pipeline.statistics().preparing_bytes == before
        bench.preprocessor.gate.set()
        await other


async def test_cancelled_read_holds_its_bytes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate = threading.Event(), threading.Event()

    def read(*_: object) -> bytes:
        entered.set()
        assert gate.wait(PATIENCE_S)
        return image_bytes()

    monkeypatch.setattr("vsched.media.measure.read_local", read)
    async with Bench() as bench:
        task = bench.start("\x01", [data_url(image_bytes())])
        assert await asyncio.to_thread(entered.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.pipeline.statistics().preparing == 0
        assert bench.pipeline.statistics().preparing_bytes > 0
        gate.set()


async def test_engine_stops_without_holding_the_loop_up(bench: Bench) -> None:
    """Only `stop` waits for an image that is still being decoded."""
    engine, at_once = Engine(Config()), Mock(spec=["stop", "close"], stop=AsyncMock())
    rest = dict.fromkeys(("arena", "launcher", "shell", "grammars", "adapters"), at_once)
    parts = cast("Any", {**rest, "media": bench.pipeline, "computes_prompt_logprobs": False})
    engine._running = RunningParts(**parts)
    decoding = await bench.stuck("\x01", [IMAGE])
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
