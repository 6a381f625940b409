"""Pruned videos: tokens of transformers' own modules with the same mask, shared embeddings, and early refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av")

import torch
from PIL import Image
from transformers import DynamicCache

from tests.e2e.asking import drawn_image
from tests.e2e.conftest import assert_idle
from tests.e2e.video_asks import (
    VideoAsk,
    assert_answers,
    drawn_frames,
    groups_encoded,
    model_inputs,
    of_frames,
    visuals_of,
)
from tests.workers.reference import Reference
from vsched import Engine
from vsched.config.sections import PoliciesConfig
from vsched.errors import RequestRefused
from vsched.media.pipeline import PreparedRequest
from vsched.media.pruning import make_pruning
from vsched.types import MediaItem
from vsched.worker.contract import view_arrays
from vsched_policies.pruning import MostChanged
from vsched_workers.families.qwen_image import PIXELS

pytestmark = pytest.mark.asyncio(loop_scope="package")

SQUARE = 40
POLICY = MostChanged(rate=0.4, threshold=0.004)


@contextmanager
def pruned(engine: Engine, policy: MostChanged) -> Iterator[None]:
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


def asks() -> list[VideoAsk]:
    """Return questions about videos that move, that rest, and that are cut; with other times, and with images."""
    moving, resting = moving_frames(21, 12), moving_frames(31, 1) * 8
    text = "What moves? " * 4
    return [
        VideoAsk([of_frames(moving), text], count=60),
        VideoAsk([of_frames(moving, fps=0.5), text], count=60),
        VideoAsk([of_frames(moving[:7]), text], count=60),
        VideoAsk(["Look: ", of_frames(resting), text], count=60),
        VideoAsk([drawn_image(7), of_frames(resting), "and ", of_frames(moving[4:]), text]),
        VideoAsk([of_frames(moving[2:]), of_frames(drawn_frames(41, 3)), drawn_image(8), text]),
    ]


async def prepare(engine: Engine, ask: VideoAsk) -> PreparedRequest:
    assert engine._running is not None
    prompt = engine.preprocessor.render(ask.messages)
    return await engine._running.media.prepare(prompt, ask.references)


def kept_tokens(
    engine: Engine, policy: MostChanged, items: Sequence[MediaItem]
) -> list[np.ndarray[Any, Any]]:
    """Return the numbers of the tokens to keep of each group of a video, most changed first."""
    assert engine._running is not None
    assert policy.rate is not None
    changes: list[tuple[float, int]] = []
    before: np.ndarray[Any, Any] | None = None
    for item in items:
        assert item.extent is not None
        arrays = view_arrays(item.arrays, engine._running.arena.read(item.extent))
        pixels = arrays[PIXELS].astype(np.float64).reshape(2, item.tokens, -1)
        found = np.ones(item.tokens)
        if before is not None:
            found = np.abs(pixels - before).mean(axis=(0, 2)) / 255
        changes += [(-change, len(changes) + at) for at, change in enumerate(found)]
        before = pixels
    most = int(len(changes) * (1 - policy.rate))
    chosen = sorted(sorted(changes)[: max(most, items[0].tokens)], key=lambda one: one[1])
    places = np.array([at for change, at in chosen if -change >= policy.threshold])
    starts = items[0].tokens * np.arange(len(items))
    return [
        places[(start <= places) & (places < start + items[0].tokens)] - start for start in starts
    ]


async def generate_pruned(
    engine: Engine, reference: Reference, ask: VideoAsk, policy: MostChanged
) -> list[int]:
    """Return the greedy tokens of transformers' own modules without the pruned tokens.

    Positions are those of the unpruned prompt; but with timestamps, groups without tokens are left out before.
    """
    whole = await prepare(engine, ask)  # the engine prunes nothing now
    visuals = visuals_of(engine, ask, whole.items)
    ids, keep = list(whole.token_ids), np.ones(len(whole.token_ids), bool)
    there = np.ones(len(ids), bool)
    model = reference.model
    config, inner = model.config, model.model
    rows, levels = [], []
    for visual in visuals:
        items = [whole.items[at] for at in visual.at]
        grid = torch.tensor([visual.grid])
        encode = getattr(inner, f"get_{visual.kind}_features")
        with torch.inference_mode():
            out = encode(visual.values, grid, return_dict=True)
        chosen = [np.arange(item.tokens) for item in items]
        if visual.kind == "video":
            chosen = kept_tokens(engine, policy, items)
            for item, some in zip(items, chosen, strict=True):
                keep[item.offset : item.end] = False
                keep[item.offset + some] = True
                if not len(some) and config.model_type == "qwen3_vl":
                    start = item.offset - 2
                    while ids[start] not in {
                        config.vision_start_token_id,
                        config.vision_end_token_id,
                    }:
                        start -= 1
                    there[start + 1 : item.end + 1] = False
                    visual.grid[0] -= 1
        at = np.concatenate([some + index * items[0].tokens for index, some in enumerate(chosen)])
        rows.append(torch.cat(list(out.pooler_output))[at])
        deepstack = getattr(out, "deepstack_features", None) or []
        levels.append([torch.cat(list(level))[at] for level in deepstack])
    whole.lease.release()
    ids, keep = np.array(ids)[there].tolist(), keep[there]
    inputs = model_inputs(reference, ids, visuals)
    with torch.inference_mode():
        positions, _ = inner.get_rope_index(**inputs)
        positions = positions[:, :, torch.from_numpy(keep)]
        tokens = inputs["input_ids"][:, keep]
        seen = inputs["mm_token_type_ids"][:, keep] > 0
        embeds = model.get_input_embeddings()(tokens)
        embeds[seen] = torch.cat(rows).to(embeds.dtype)
        more: dict[str, Any] = {}
        if levels[0]:
            more = {"visual_pos_masks": seen}
            more["deepstack_visual_embeds"] = [
                torch.cat(each) for each in zip(*levels, strict=True)
            ]
        cache, found = DynamicCache(), []
        for _ in range(ask.count):
            out = inner.language_model(
                inputs_embeds=embeds, position_ids=positions, past_key_values=cache, **more
            )
            token = model.lm_head(out.last_hidden_state[:, -1]).argmax(-1)
            found.append(int(token))
            embeds = model.get_input_embeddings()(token[None])
            positions = positions[:, :, -1:].amax(0, keepdim=True).expand(3, 1, 1) + 1
            more = {}
    return found


@pytest.mark.parametrize("size", ["nano25", "nano3"])
async def test_answers_equal_transformers_modules_with_the_same_mask(
    size: str,
    shared_engine: Engine,
    together_engine: Engine,
    checkpoints: Callable[[str], Path],
) -> None:
    """Twice 6 requests at a time, in chunks of 48 tokens, which end within groups, with preemptions."""
    engine = shared_engine if size == "nano25" else together_engine
    reference, asked = Reference(checkpoints(size)), asks()
    expected = [await generate_pruned(engine, reference, ask, POLICY) for ask in asked]
    whole = [await prepare(engine, ask) for ask in asked]
    for each in whole:
        each.lease.release()
    with pruned(engine, POLICY):
        await assert_answers(engine, asked, expected)
        some = [await prepare(engine, ask) for ask in asked]
        for each in some:
            each.lease.release()
    assert all(
        len(each.token_ids) < len(other.token_ids) for each, other in zip(some, whole, strict=True)
    )
    kept = [item for each in some for item in each.items]
    assert any(len(item.kept) > 1 for item in kept), "no group keeps several runs of tokens"
    assert len(kept) < sum(len(each.items) for each in whole), "no group is left out"
    await assert_idle(engine)


async def test_pruned_videos_share_embeddings_and_left_out_groups_are_not_encoded(
    engine: Engine,
) -> None:
    """The mask is no part of an embedding's key: other masks, and no mask, find it."""

    async def encoded(frames: Sequence[Image.Image]) -> int:
        return await groups_encoded(engine, of_frames(frames))

    frames = moving_frames(51, 12)
    with pruned(engine, POLICY):
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
        fits.lease.release()
        assert 1000 < len(fits.token_ids) < 1200
        before = media.statistics().processed
        with pytest.raises(RequestRefused, match="leaves no room"):
            await prepare(engine, VideoAsk([of_frames(frames * 2), "?"]))
        assert media.statistics().processed == before
    with pytest.raises(RequestRefused, match="leaves no room"):
        await prepare(engine, VideoAsk([of_frames(frames), "?"]))
