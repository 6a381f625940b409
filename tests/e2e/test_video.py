"""Videos: tokens of transformers' `generate`, embeddings by frame group, and files from clients."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import data_url, drawn_image
from tests.e2e.conftest import assert_idle
from tests.e2e.video_asks import (
    SIZE,
    VideoAsk,
    assert_answers,
    drawn_frames,
    generate_videos,
    groups_encoded,
    of_frames,
)
from tests.unit.media.video_files import hostile_files, video
from tests.workers.driver import Clip
from vsched import Engine
from vsched.api.server import RunningServer

pytestmark = pytest.mark.asyncio(loop_scope="package")


def url_of(file: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def asks() -> list[VideoAsk]:
    """Return questions with videos of odd lengths and other times, repeated, and mixed with images."""
    long, slow = Clip(drawn_frames(1, 15)), Clip(drawn_frames(1, 15), fps=0.5)
    text = "What comes first? " * 4
    return [
        VideoAsk([long, text], count=60),
        VideoAsk([Clip(drawn_frames(2, 16), fps=4.0), text], count=60),
        VideoAsk([drawn_image(7), long, drawn_image(8), text], count=60),
        VideoAsk([Clip(drawn_frames(3, 4)), Clip(drawn_frames(4, 1)), text], count=60),
        VideoAsk([slow, text], count=60),
        VideoAsk([slow, "?"], count=8),
    ]


@pytest.mark.parametrize("size", ["nano25", "nano3"])
async def test_answers_about_videos_equal_generate(
    size: str, shared_engine: Engine, together_engine: Engine, checkpoints: Callable[[str], Path]
) -> None:
    """Twice 6 requests at a time, in chunks of 48 tokens, which end within groups, with preemptions."""
    engine = shared_engine if size == "nano25" else together_engine
    expected = generate_videos(checkpoints(size), asks())
    assert len({tuple(tokens[:8]) for tokens in expected}) == len(expected)
    await assert_answers(engine, asks(), expected)
    await assert_idle(engine)


async def test_a_longer_video_is_encoded_from_where_it_is_new(engine: Engine) -> None:
    """A repeated video needs no encoding, an extended one only of its new groups; equal groups count once."""
    for frames, fps, count in (
        (drawn_frames(11, 8), 2.0, 4),
        (drawn_frames(11, 8), 1.0, 0),
        (drawn_frames(11, 10), 2.0, 1),
        (drawn_frames(12, 1) * 6, 2.0, 1),
    ):
        assert await groups_encoded(engine, of_frames(frames, fps)) == count


async def test_videos_over_http(server: RunningServer, engine: Engine) -> None:
    """A file, its frames, and vLLM's frames have the same tokens; options are per request or per video."""
    frames = drawn_frames(14, 6)
    url = url_of(video(16, size=SIZE, rate=8))
    text = {"type": "text", "text": "?"}
    jpegs = ",".join(data_url(frame).partition(",")[2] for frame in frames[:4])
    parts_and_options: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        ({"type": "video_url", "video_url": {"url": url}}, {}, 4),
        ({"type": "video_url", "video_url": url, "fps": 4}, {}, 8),
        ({"type": "video", "video": url}, {"mm_processor_kwargs": {"num_frames": 6}}, 6),
        (
            {"type": "video_url", "video_url": url},
            {"media_io_kwargs": {"video": {"fps": 8, "max_frames": 10}}},
            10,
        ),
        ({"type": "video", "video": [data_url(frame) for frame in frames]}, {}, 6),
        ({"type": "video_url", "video_url": f"data:video/jpeg;base64,{jpegs}"}, {}, 4),
    ]
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as plain:
        plain_text = {"messages": [{"role": "user", "content": [text]}]}
        less = (await plain.post("/tokenize", json=plain_text)).json()["count"]
        for part, options, count in parts_and_options:
            body = {"messages": [{"role": "user", "content": [part, text]}], **options}
            asked = body | {"max_tokens": 2, "temperature": 0}
            answer = await plain.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens"] == less + 2 + count // 2 * 4 * 3
        for part, message in (
            ({"type": "video_url", "video_url": url, "fps": 2, "num_frames": 4}, "exclude"),
            ({"type": "video_url", "video_url": url_of(b"no video" * 99)}, "cannot be decoded"),
        ):
            asked = {"messages": [{"role": "user", "content": [part, text]}]}
            answer = await plain.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 400, answer.text
            assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.thorough)])
async def test_hostile_files_do_not_affect_other_requests(
    share: int, server: RunningServer, engine: Engine
) -> None:
    """Each of over 60 files, or a share of them, is served or refused as the client's error, and others go on."""
    files = list(hostile_files())
    assert len(files) >= 60
    known = {"sound and picture": 200, "variable rate": 200, "rotated": 200, "one frame": 200}
    known |= {"empty": 400, "playlist": 400, "only sound": 400, "a day": 400, "text": 400}
    known["codec not accepted"] = 400
    text = {"type": "text", "text": "?"}
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as plain:
        for name, file in files[::share]:
            part = {"type": "video_url", "video_url": url_of(file), "num_frames": 4}
            body = {"messages": [{"role": "user", "content": [part, text]}], "max_tokens": 1}
            answer, beside = await asyncio.gather(
                plain.post("/v1/chat/completions", json=body),
                plain.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}),
            )
            assert beside.status_code == 200
            assert answer.status_code in {200, 400, 413}, (name, answer.text)
            assert answer.status_code == known.get(name, answer.status_code), name
            if answer.status_code != 200:
                assert "Remedy" in answer.json()["error"]["message"], name
