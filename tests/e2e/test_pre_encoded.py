"""With real ranks, a client that sends embeddings gets the tokens that the image itself would have got."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from PIL import Image
from safetensors.numpy import save

from tests.e2e.asking import TEXTS, Ask, drawn_image
from tests.e2e.conftest import assert_idle
from tests.e2e.video_asks import VideoAsk, ask_video, drawn_frames
from tests.parity.compare import load_on
from tests.workers.driver import Clip, Stage
from vsched import Config, Engine, RequestRefused
from vsched.media import MediaReference
from vsched.worker.contract import Arrays, EncodeJob, ImagePlan
from vsched_workers.families.qwen_image import grid_of

pytestmark = pytest.mark.asyncio(loop_scope="package")

IMAGES = [drawn_image(700 + number, size) for number, size in enumerate([(90, 60), (140, 100)])]
ASK = Ask(TEXTS[0], IMAGES)


@dataclass
class Served:
    """An engine, and the same tower on the client's side."""

    engine: Engine
    stage: Stage

    def rows(self, plan: ImagePlan, arrays: Arrays) -> npt.NDArray[np.float32]:
        """Encode an image or a frame group."""
        page = np.zeros((1, plan.tokens, self.stage.info.embedding_row_bytes), np.uint8)
        job = EncodeJob(b"", plan.tokens, arrays, plan.metadata, [0])
        self.stage.encoder.encode([job], page)
        rows: npt.NDArray[np.float32] = page[0].view(np.float32)
        return rows

    def embed(self, image: Image.Image) -> MediaReference:
        front = self.stage.preprocessor
        plan = front.plan_image(*image.size)
        rows = self.rows(plan, front.process_image(image))
        return packed({"embeds": rows, "grid_thw": np.array(grid_of(plan.metadata))})

    def embed_video(self, video: Clip) -> dict[str, npt.NDArray[Any]]:
        """Return the rows, grid and times of a video."""
        groups = video.groups(self.stage.preprocessor)
        rows = np.concatenate([self.rows(plan, arrays) for plan, arrays in groups])
        grid = np.array([len(groups), *grid_of(groups[0][0].metadata)[1:]])
        times = {"second_per_grid_ts": np.array([2 / video.fps])}
        if self.stage.preprocessor.video_times == "timestamps":
            last = len(video.frames) - 1
            pairs = [(2 * at, min(2 * at + 1, last)) for at in range(len(groups))]
            times = {"timestamps": np.array([sum(pair) / 2 / video.fps for pair in pairs])}
        return {"embeds": rows, "grid_thw": grid, **times}


def packed(tensors: dict[str, npt.NDArray[Any]], *, is_video: bool = False) -> MediaReference:
    source = base64.b64encode(save(tensors)).decode()
    return MediaReference(source, is_video=is_video, is_embedded=True)


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
    async with Engine(config) as engine:
        yield Served(engine, load_on("cpu", config.model.path))
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
    engine = served.engine
    [wanted] = generated(engine.model_name, [ASK])
    brought = [served.embed(image) for image in IMAGES]
    before = media(engine)
    assert await ask(engine, brought) == wanted
    assert media(engine) == (before[0], before[1] + 2), "no image was sent, none was decoded"
    for first in (IMAGES[0], brought[0]):
        for second in (IMAGES[1], brought[1]):
            assert await ask(engine, [first, second]) == wanted
    swapped = await ask(engine, brought[::-1])
    assert swapped == await ask(engine, IMAGES[::-1])
    assert swapped != wanted


async def test_embeddings_of_videos_answer_as_the_videos_do(served: Served) -> None:
    """In chunks of 48 tokens, mixed with raw videos and images."""
    engine = served.engine
    videos = [Clip(drawn_frames(21, 11)), Clip(drawn_frames(22, 4), fps=0.5)]
    tensors = [served.embed_video(video) for video in videos]
    long, short = (packed(each, is_video=True) for each in tensors)
    text = "What comes first? " * 4
    wanted = await ask_video(engine, VideoAsk([videos[0], text]))
    before = media(engine)
    assert await ask_video(engine, VideoAsk([long, text])) == wanted
    assert media(engine) == (before[0], before[1] + 1)
    other = packed(tensors[0] | {"embeds": tensors[0]["embeds"][::-1].copy()}, is_video=True)
    assert await ask_video(engine, VideoAsk([other, text])) != wanted
    image = IMAGES[0]
    wanted = await ask_video(engine, VideoAsk([image, *videos, "and ", image, text], count=30))
    for first, second, third in ((long, videos[1], image), (videos[0], short, served.embed(image))):
        parts: list[Any] = [image, first, second, "and ", third, text]
        assert await ask_video(engine, VideoAsk(parts, count=30)) == wanted
    encoded = engine.statistics()["encode"]["items_encoded"]
    assert await ask_video(engine, VideoAsk([long, "Again?"], count=1))
    assert engine.statistics()["encode"]["items_encoded"] == encoded, "each group is cached"


async def test_grids_of_embedded_videos_are_checked(served: Served) -> None:
    """However large their numbers are."""
    tensors = served.embed_video(Clip(drawn_frames(23, 4)))
    for code, grid in {
        "grid_thw_invalid": tensors["grid_thw"] - [0, 1, 0],
        "video_frames_exceeded": tensors["grid_thw"] * [1 << 40, 1, 1],
        "image_tokens_exceeded": tensors["grid_thw"] * [1, 1 << 20, 1],
        "embeds_tokens": tensors["grid_thw"] * [1, 2, 1],
    }.items():
        video = packed(tensors | {"grid_thw": grid}, is_video=True)
        with pytest.raises(RequestRefused, match="video 0: .*Remedy: ") as caught:
            await ask_video(served.engine, VideoAsk([video, "?"], count=1))
        assert (caught.value.code, caught.value.status) == (code, 400)
