"""With real ranks, a client that sends embeddings gets the tokens that the image itself would have got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from PIL import Image

from tests.e2e.asking import TEXTS, Ask, drawn_image
from tests.e2e.conftest import SETTINGS, assert_idle
from tests.e2e.tower import Tower, packed
from tests.e2e.video_asks import SIZE, VideoAsk, ask_video, drawn_frames, of_frames
from tests.parity.vision_checkpoints import make_vision_checkpoint
from vsched import Config, Engine, RequestRefused
from vsched.config import load_config
from vsched.media import MediaReference
from vsched.worker.contract import view_arrays
from vsched_workers.families.generic import EMBEDDED_SIZE
from vsched_workers.families.qwen_image import grid_of

pytestmark = pytest.mark.asyncio(loop_scope="package")

IMAGES = [drawn_image(700 + number, size) for number, size in enumerate([(90, 60), (140, 100)])]
ASK = Ask(TEXTS[0], IMAGES)


@dataclass
class Served:
    engine: Engine
    tower: Tower


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="package",
    # With deepstack levels, and without.
    params=["nano3", pytest.param("nano25", marks=pytest.mark.thorough)],
)
async def served(
    request: pytest.FixtureRequest, configure: Callable[..., Config]
) -> AsyncIterator[Served]:
    config = configure(request.param, "media.allow_embeddings=true")
    tower = await asyncio.to_thread(Tower.load, config.model.path)
    async with Engine(config) as engine:
        yield Served(engine, tower)
        await assert_idle(engine)


def media(engine: Engine) -> tuple[int, int]:
    """Number of images that the engine decoded, and of embeddings that it received."""
    counts = engine.statistics()["media"]
    return counts["processed"], counts["embedded"]


async def ask(engine: Engine, images: Sequence[Image.Image | MediaReference]) -> list[int]:
    return await ask_video(engine, VideoAsk([*images, ASK.text]))


@pytest.mark.slow
async def test_embeddings_answer_as_their_images_do(
    served: Served, generated: Callable[[str, Sequence[Ask]], list[list[int]]]
) -> None:
    """Alone, every mixture of raw and embedded, in order, deepstack levels included."""
    engine, tower = served.engine, served.tower
    [wanted] = generated(engine.model_name, [ASK])
    brought = [tower.embed(image) for image in IMAGES]
    before = media(engine)
    assert await ask(engine, brought) == wanted
    assert media(engine) == (before[0], before[1] + 2), "no image was sent, none was decoded"
    for images in ([IMAGES[0], brought[1]], [brought[0], IMAGES[1]], IMAGES):
        assert await ask(engine, images) == wanted
    swapped = await ask(engine, brought[::-1])
    assert swapped == await ask(engine, IMAGES[::-1])
    assert swapped != wanted


async def embed_video(
    engine: Engine, tower: Tower, video: MediaReference
) -> dict[str, npt.NDArray[Any]]:
    """Return the rows, grid or size, and times of a video that is sent as its frames."""
    assert engine._running is not None
    prompt = engine.preprocessor.render(VideoAsk([video]).messages)
    prepared = await engine._running.media.prepare(prompt, [video])
    rows = []
    for item in prepared.items:
        assert item.extent is not None
        arrays = view_arrays(item.arrays, engine._running.arena.read(item.extent))
        rows.append(tower.encode_item(arrays, item.tokens, item.metadata))
    prepared.lease.release()
    fps, count = video.sampling.fps, len(video.sources)
    assert fps is not None
    if tower.preprocessor.companion == EMBEDDED_SIZE:
        size = {"image_size": np.array(SIZE[::-1])}
        seconds = np.array([index / fps for index in range(count)])
        return {"embeds": np.concatenate(rows), **size, "timestamps": seconds}
    grid = np.array([len(rows), *grid_of(prepared.items[0].metadata)[1:]])
    times = {"second_per_grid_ts": np.array([2 / fps])}
    if tower.preprocessor.video_times == "timestamps":
        pairs = [(2 * group, min(2 * group + 1, count - 1)) for group in range(len(rows))]
        times = {"timestamps": np.array([(first / fps + end / fps) / 2 for first, end in pairs])}
    return {"embeds": np.concatenate(rows), "grid_thw": grid, **times}


def as_video(tensors: dict[str, npt.NDArray[Any]]) -> MediaReference:
    return MediaReference(packed(**tensors).source, is_video=True, is_embedded=True)


async def test_embeddings_of_videos_answer_as_the_videos_do(served: Served) -> None:
    """In chunks of 48 tokens, mixed with raw videos and images."""
    engine = served.engine
    videos = [of_frames(drawn_frames(21, 11)), of_frames(drawn_frames(22, 4), fps=0.5)]
    tensors = [await embed_video(engine, served.tower, video) for video in videos]
    long, short = map(as_video, tensors)
    text = "What comes first? " * 4
    wanted = await ask_video(engine, VideoAsk([videos[0], text]))
    before = media(engine)
    assert await ask_video(engine, VideoAsk([long, text])) == wanted
    assert media(engine) == (before[0], before[1] + 1)
    other = {name: tensor[::-1].copy() for name, tensor in tensors[0].items() if name == "embeds"}
    assert await ask_video(engine, VideoAsk([as_video(tensors[0] | other), text])) != wanted
    image = IMAGES[0]
    wanted = await ask_video(engine, VideoAsk([image, *videos, "and ", image, text], count=30))
    for first, second, third in (
        (long, videos[1], image),
        (videos[0], short, served.tower.embed(image)),
    ):
        parts: list[Any] = [image, first, second, "and ", third, text]
        assert await ask_video(engine, VideoAsk(parts, count=30)) == wanted
    encoded = engine.statistics()["encode"]["items_encoded"]
    assert await ask_video(engine, VideoAsk([long, "Again?"], count=1))
    assert engine.statistics()["encode"]["items_encoded"] == encoded, "each group is cached"


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["glm4v", "smolvlm"])
async def test_embedded_videos_of_other_families(family: str, tmp_path: Path) -> None:
    """Embeddings with the size and the times of their frames answer as the video does."""
    make_vision_checkpoint(family, tmp_path)
    sets = [f"model.path={tmp_path}", "media.allow_embeddings=true", "generate.context_tokens=0"]
    config = load_config(None, sets=[*SETTINGS, *sets], environ={}).config
    tower = await asyncio.to_thread(Tower.load, str(tmp_path))
    async with Engine(config) as engine:
        video, text = of_frames(drawn_frames(24, 7)), "What comes first?"
        wanted = await ask_video(engine, VideoAsk([video, text]))
        tensors = await embed_video(engine, tower, video)
        before = media(engine)
        assert await ask_video(engine, VideoAsk([as_video(tensors), text])) == wanted
        assert media(engine) == (before[0], before[1] + 1)
        bad = as_video(tensors | {"timestamps": np.zeros(0)})
        with pytest.raises(RequestRefused, match="0 frames, limit 768 frames"):
            await ask_video(engine, VideoAsk([bad, text]))


async def test_grids_of_embedded_videos_are_checked(served: Served) -> None:
    """However large their numbers are."""
    tensors = await embed_video(served.engine, served.tower, of_frames(drawn_frames(23, 4)))
    for code, grid in {
        "grid_thw_invalid": tensors["grid_thw"] - [0, 1, 0],
        "video_frames_exceeded": tensors["grid_thw"] * [1 << 40, 1, 1],
        "image_tokens_exceeded": tensors["grid_thw"] * [1, 1 << 20, 1],
        "embeds_tokens": tensors["grid_thw"] * [1, 2, 1],
    }.items():
        video = as_video(tensors | {"grid_thw": grid})
        with pytest.raises(RequestRefused, match="video 0: .*Remedy: ") as caught:
            await ask_video(served.engine, VideoAsk([video, "?"], count=1))
        assert (caught.value.code, caught.value.status) == (code, 400)
