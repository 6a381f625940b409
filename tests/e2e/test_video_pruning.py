"""Pruned videos: tokens of transformers' own modules with the same mask, shared embeddings, and early refusal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from PIL import Image

from tests.e2e.asking import drawn_image
from tests.e2e.conftest import assert_idle
from tests.e2e.video_asks import VideoAsk, ask_video, groups_encoded, of_frames
from tests.parity.video_compare import KEPT, answers_about_pruned_video
from tests.workers import driver
from vsched import Engine
from vsched.config.sections import PoliciesConfig
from vsched.errors import RequestRefused
from vsched.media.pipeline import PreparedRequest
from vsched.media.pruning import make_pruning
from vsched.policy import PruningPolicy, PruningView
from vsched_policies.pruning import MostChanged

pytestmark = pytest.mark.asyncio(loop_scope="package")

SQUARE = 40


@contextmanager
def pruned(engine: Engine, policy: PruningPolicy) -> Iterator[None]:
    """Prune the videos of a running engine, as if it had been started with this policy."""
    assert engine._running is not None
    media = engine._running.media
    media.clear()
    media._pruning = made = make_pruning(policy, PoliciesConfig())
    media._measurer._with_changes = True
    try:
        yield
    finally:
        media._pruning, media._measurer._with_changes = None, False
        if made is not None:
            assert made.figures()["policy_faults"] == {}
            made.close()


def moving_frames(seed: int, count: int, size: tuple[int, int] = (168, 128)) -> list[Image.Image]:
    """Return frames of a square that rests for four frames, then moves; every 16 frames again."""
    picture, square = drawn_image(seed, size), drawn_image(seed + 1, (SQUARE, SQUARE))
    frames = []
    for index in range(count):
        frame = picture.copy()
        frame.paste(square, (7 * max(index % 16 - 3, 0), 5 * (index // 8)))
        frames.append(frame)
    return frames


async def prepare(engine: Engine, ask: VideoAsk) -> PreparedRequest:
    """Prepare a request, and release it."""
    assert engine._running is not None
    prompt = engine.preprocessor.render(ask.messages)
    prepared = await engine._running.media.prepare(prompt, ask.references)
    prepared.lease.release()
    return prepared


class Masked(PruningPolicy, frozen=True, kw_only=True):
    """Keeps the tokens of the comparison with transformers: runs of a group, and nothing of another."""

    def prune(self, view: PruningView) -> bytes:
        return bytes(map(int, "".join(KEPT)))


@pytest.mark.parametrize(
    ("family", "size"),
    [("qwen2_5_vl", "nano25"), pytest.param("qwen3_vl", "nano3", marks=pytest.mark.thorough)],
)
async def test_answers_equal_transformers_modules_with_the_same_mask(
    family: str, size: str, shared_engine: Engine, together_engine: Engine
) -> None:
    engine = shared_engine if size == "nano25" else together_engine
    _, wanted = answers_about_pruned_video(family)
    frames = [driver.drawn_image(100 + index, 112, 56) for index in range(7)]
    ask = VideoAsk([of_frames(frames), "what moves?"], count=len(wanted))
    with pruned(engine, Masked(rate=0.5)):
        assert await ask_video(engine, ask) == wanted
    assert await ask_video(engine, ask) != wanted
    await assert_idle(engine)


async def test_pruned_videos_share_embeddings_and_left_out_groups_are_not_encoded(
    engine: Engine,
) -> None:
    """The mask is no part of an embedding's key: other masks, and no mask, find it."""

    async def encoded(frames: Sequence[Image.Image]) -> int:
        return await groups_encoded(engine, of_frames(frames))

    frames = moving_frames(51, 12)
    with pruned(engine, MostChanged(rate=0.4, threshold=0.004)):
        assert await encoded(frames) == 5, "the second group equals the first"
        assert await encoded(frames) == 0
        assert await encoded(frames[:8]) == 0
        assert await encoded([*frames, *moving_frames(51, 14)[12:]]) == 1
        assert await encoded([frames[0]] * 8) == 0
    with pruned(engine, MostChanged(rate=0.0)):
        assert await encoded(frames) == 0
    assert await encoded(frames) == 0


async def test_the_context_is_checked_with_pruned_tokens_before_decoding(engine: Engine) -> None:
    """A video of 2,200 tokens fits into 2,048 if half are pruned; one of 4,400 is refused, and no frame is decoded."""
    assert engine._running is not None
    media = engine._running.media
    frames = [drawn_image(71, (140, 140)), drawn_image(72, (140, 140))] * 88
    with pruned(engine, MostChanged(rate=0.5)):
        fits = await prepare(engine, VideoAsk([of_frames(frames), "?"]))
        assert 1000 < len(fits.token_ids) < 1200
        before = media.statistics().processed
        with pytest.raises(RequestRefused, match="leaves no room"):
            await prepare(engine, VideoAsk([of_frames(frames * 2), "?"]))
        assert media.statistics().processed == before
    with pytest.raises(RequestRefused, match="leaves no room"):
        await prepare(engine, VideoAsk([of_frames(frames), "?"]))
