"""Pruned videos: tokens of transformers' own modules with the same mask, shared embeddings, and early refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import DynamicCache

from tests.e2e.conftest import assert_idle
from tests.e2e.video_asks import (
    VideoAsk,
    ask_video,
    drawn_frames,
    groups_encoded,
    of_frames,
    question_inputs,
)
from tests.parity.compare import library_model, load_on
from tests.workers.driver import Clip
from vsched import Engine
from vsched.config.sections import PoliciesConfig
from vsched.errors import RequestRefused
from vsched.media.pipeline import PreparedRequest
from vsched.media.pruning import make_pruning
from vsched.policy import PruningPolicy, PruningView
from vsched_policies.pruning import MostChanged

pytestmark = pytest.mark.asyncio(loop_scope="package")

WITHOUT_PLACE = ("pixel_values_videos", "attention_mask")
"""Inputs of the model that positions do not depend on."""


@contextmanager
def pruned(engine: Engine, policy: PruningPolicy) -> Iterator[None]:
    """Prune the videos of a running engine, as if it had been started with this policy."""
    assert engine._running is not None
    media = engine._running.media
    media.clear()
    media.pruning = made = make_pruning(policy, PoliciesConfig())
    media._measurer._with_changes = True
    try:
        yield
    finally:
        media.pruning, media._measurer._with_changes = None, False
        if made is not None:
            assert made.figures()["policy_faults"] == {}
            made.close()


async def prepare(engine: Engine, ask: VideoAsk) -> PreparedRequest:
    """Prepare a request, and release it."""
    assert engine._running is not None
    prompt = engine.preprocessor.render(ask.messages)
    prepared = await engine._running.media.prepare(prompt, ask.references)
    prepared.lease.release()
    return prepared


def kept_mask(groups: int, tokens: int) -> bytes:
    """Return the mask of the first frame group, and of every third token of the others."""
    return bytes(at < tokens or at % 3 == 1 for at in range(groups * tokens))


class EveryThird(PruningPolicy, frozen=True, kw_only=True):
    """Keeps the tokens of `kept_mask`."""

    def prune(self, view: PruningView) -> bytes:
        return kept_mask(view.groups, view.rows * view.columns)


@torch.inference_mode()
def generate_pruned(path: Path, ask: VideoAsk) -> list[int]:
    """Return the greedy tokens of transformers' own modules without the pruned tokens, at their positions."""
    model: Any = library_model(path, sees=True)
    inputs = question_inputs(load_on("cpu", str(path)), model, ask)
    encoded = model.model.get_video_features(
        inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True
    )
    ids, groups = inputs["input_ids"], int(inputs["video_grid_thw"][0, 0])
    seen = ids[0] == model.config.video_token_id
    mask = torch.tensor(list(kept_mask(groups, int(seen.sum()) // groups)), dtype=torch.bool)
    kept = torch.ones(ids.shape[1], dtype=torch.bool)
    kept[seen] = mask
    rope = {name: each for name, each in inputs.items() if name not in WITHOUT_PLACE}
    positions = model.model.get_rope_index(**rope)[0][:, :, kept]
    embeds = model.get_input_embeddings()(ids[:, kept])
    embeds[:, seen[kept]] = torch.cat(list(encoded.pooler_output))[mask]
    more: dict[str, Any] = {}
    if levels := getattr(encoded, "deepstack_features", None):
        more["visual_pos_masks"] = seen[kept][None]
        more["deepstack_visual_embeds"] = [torch.cat(list(level))[mask] for level in levels]
    cache, found = DynamicCache(), []
    for _ in range(ask.count):
        out = model.model.language_model(None, None, positions, cache, embeds, **more)
        token = model.lm_head(out.last_hidden_state[:, -1]).argmax(-1)
        found.append(int(token))
        embeds = model.get_input_embeddings()(token[None])
        positions = positions[:, :, -1:].amax(0, keepdim=True).expand(3, 1, 1) + 1
        more = {}
    return found


@pytest.mark.parametrize("size", ["nano25", "nano3"])
async def test_answers_equal_transformers_modules_with_the_same_mask(
    size: str, shared_engine: Engine, together_engine: Engine, checkpoints: Callable[[str], Path]
) -> None:
    """In chunks of 48 tokens, which end within groups, and again from the prefix cache."""
    engine = shared_engine if size == "nano25" else together_engine
    ask = VideoAsk([Clip(drawn_frames(21, 15)), "What moves? " * 4], count=40)
    wanted = generate_pruned(checkpoints(size), ask)
    assert await ask_video(engine, ask) != wanted
    with pruned(engine, EveryThird(rate=0.4)):
        for _ in range(2):
            assert await ask_video(engine, ask) == wanted
    await assert_idle(engine)


async def test_pruned_videos_share_embeddings_and_encode_only_kept_groups(engine: Engine) -> None:
    """The mask is no part of an embedding's key: other masks, and no mask, find it."""

    async def encoded(frames: Sequence[Image.Image]) -> int:
        return await groups_encoded(engine, of_frames(frames))

    pictures = drawn_frames(51, 6, (168, 128))
    frames = [pictures[at] for at in (0, 0, 1, 2, 3, 4) for _ in range(2)]
    with pruned(engine, MostChanged(rate=0.4, threshold=0.004)):
        assert await encoded(frames) == 5, "the second group equals the first"
        assert await encoded(frames) == 0
        assert await encoded(frames[:8]) == 0
        assert await encoded([*frames, *pictures[5:], *pictures[5:]]) == 1
        assert await encoded([frames[0]] * 8) == 0
    with pruned(engine, MostChanged(rate=0.0)):
        assert await encoded(frames) == 0
    assert await encoded(frames) == 0


async def test_the_context_is_checked_with_pruned_tokens_before_decoding(engine: Engine) -> None:
    """A video of 2,560 tokens fits into 2,048 if half are pruned; one of 5,120 is refused, and no frame is decoded."""
    assert engine._running is not None
    media = engine._running.media
    frames = drawn_frames(71, 20, (448, 448))
    with pruned(engine, MostChanged(rate=0.5)):
        fits = await prepare(engine, VideoAsk([of_frames(frames), "?"]))
        assert 1280 < len(fits.token_ids) < 1400
        before = media.statistics().processed
        with pytest.raises(RequestRefused, match="leaves no room"):
            await prepare(engine, VideoAsk([of_frames(frames * 2), "?"]))
        assert media.statistics().processed == before
    with pytest.raises(RequestRefused, match="leaves no room"):
        await prepare(engine, VideoAsk([of_frames(frames), "?"]))
