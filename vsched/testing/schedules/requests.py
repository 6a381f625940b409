"""Explicit and random requests and limits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from vsched.kernel import SchedulerLimits
from vsched.types import Extent, MediaItem, Request, SamplingParams

PLACEHOLDER = 5
SEPARATOR = 6
"""Follows each row of an image with rows."""
IMAGES = 6
"""Number of images shared by random requests: few enough for hits, preemptions and evictions."""

_NO_ROWS: Mapping[bytes, int] = MappingProxyType({})


def make_request(
    name: str,
    text: Sequence[int],
    items: Sequence[tuple[int, int, bytes]] = (),
    *,
    max_tokens: int = 4,
    encoded: Sequence[bytes] = (),
    row_tokens: Mapping[bytes, int] = _NO_ROWS,
    strides: Mapping[bytes, int] = _NO_ROWS,
    halved: Sequence[bytes] = (),
    priority: int = 0,
    ttft_target_ms: int | None = None,
    cache_salt: str = "",
    adapter: int = 0,
) -> Request:
    """Return a request of `text` with images inserted.

    Args:
        name: The request's id.
        text: Token ids of the text.
        items: Index in the text, tokens and key of each image.
        max_tokens: Number of tokens to generate.
        encoded: Keys of the images that are given as embeddings.
        row_tokens: Placeholders per row of an image, by key, each followed by a separator; other
            images have none.
        strides: Of these images, by key, only every such row has a placeholder.
        halved: Keys of the images of which only the second half has bidirectional attention.
        priority: As in `Request`.
        ttft_target_ms: As in `Request`.
        cache_salt: As in `Request`.
        adapter: As in `Request`.
    """
    tokens: list[int] = []
    placed: list[MediaItem] = []
    position = 0
    for index, count, key in items:
        tokens += text[position:index]
        position = index
        offset = len(tokens)
        spans: list[tuple[int, int]] = []
        width = row_tokens.get(key, count) or 1
        kept: list[tuple[int, int]] = []
        if (stride := strides.get(key, 1)) > 1:
            kept = [(row, row + 1) for row in range(0, count, stride)]
        for left in range(len(kept) or count, 0, -width):
            if spans:
                tokens.append(SEPARATOR)
            spans.append((len(tokens), len(tokens) + min(width, left)))
            tokens += [PLACEHOLDER] * min(width, left)
        placed.append(
            MediaItem(
                key=key,
                tokens=count,
                offset=offset,
                metadata=count.to_bytes(4, "little"),
                extent=Extent(0, 16),
                encoded=key in encoded,
                spans=tuple(spans) if len(spans) > 1 or kept else (),
                kept=tuple(kept),
                attention=((offset + count // 2, offset + count),) if key in halved else None,
            )
        )
    tokens += text[position:]
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        items=tuple(placed),
        sampling=SamplingParams(max_tokens=max_tokens),
        priority=priority,
        ttft_target_ms=ttft_target_ms,
        cache_salt=cache_salt,
        adapter=adapter,
    )


def random_request(
    rng: random.Random, name: str, *, image_tokens_max: int = 30, length_max: int = 60
) -> Request:
    """Return a request with a random text (often a shared prefix) and some images from a small set.

    Some images are given as embeddings; some requests have a priority, a target, a cache salt or an
    adapter.
    """
    text = [(7 * index) % 50 + 10 for index in range(rng.randint(1, length_max))]
    if rng.random() < 0.5:
        text = [rng.randint(10, 60) for _ in text]
    salt = rng.choice(["", "", "", "tenant"])
    count = rng.choice([0, 0, 1, 1, 2, 4])
    places = sorted(rng.choice([0, 1, rng.randint(0, len(text))]) for _ in range(count))
    items = []
    for place in places:
        image = rng.randrange(IMAGES)
        key = f"image{image}{salt}".encode()
        # Two images of each size: their prompts differ only in the keys.
        tokens = 1 + (image // 2 * 11) % image_tokens_max
        # Sometimes the length differs for the same key: such a request may fail, but must not
        # affect others.
        items.append((place, tokens + (rng.random() < 0.02), key))
    return make_request(
        name,
        text,
        items,
        max_tokens=rng.randint(1, 30),
        encoded=(f"image0{salt}".encode(), f"image3{salt}".encode()),
        row_tokens={f"image2{salt}".encode(): 5, f"image5{salt}".encode(): 1},
        strides={f"image4{salt}".encode(): 1 + sum(text) % 3},
        halved=(f"image3{salt}".encode(),),
        priority=rng.choice([0, 0, 0, 1, 5, -1]),
        ttft_target_ms=rng.choice([None, None, 0, 1, 100]),
        cache_salt=salt,
        adapter=(0, 0, 1, 2)[sum(text) % 4],
    )


def random_limits(rng: random.Random) -> SchedulerLimits:
    """Return limits in which some resource is usually scarce."""
    slots = rng.randint(1, 6)
    encoders, generators = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    drawn = SchedulerLimits(
        block_size=rng.choice([1, 2, 4, 16]),
        blocks=rng.randint(12, 120),
        slots=slots,
        batch_tokens=slots + rng.randint(1, 60),
        chunk_tokens=rng.randint(1, 40),
        step_target_ns=rng.choice([0, 0, 1, 200, 5_000]),
        context_tokens=rng.randint(40, 400),
        page_rows=rng.choice([1, 4, 8]),
        pages=rng.randint(4, 40),
        encode_items=rng.randint(1, 4),
        waiting=rng.randint(5, 50),
        waiting_bytes=rng.choice([1 << 30, 1 << 30, 1000]),
        prefix_cache=rng.random() < 0.7,
        generate_depth=rng.choice([1, 2, 2, 3]),
        waiting_ns=rng.choice([0, 0, 0, 20_000_000]),
        encoders=encoders,
        generators=generators,
        encode_pauses=encoders == generators and rng.random() < 0.5,
    )
    # Every third model has a recurrent state; derived from earlier draws, so that seeds of other
    # models do not change.
    keeps_state = drawn.blocks % 3 == 0
    places = drawn.blocks % 7 if drawn.prefix_cache else 0
    # Every fourth model has bidirectional attention spans; in half of them the span is the whole
    # prompt.
    sees_ahead = drawn.waiting % 4 == 0
    prompt_atomic = sees_ahead and drawn.pages % 2 == 0
    return msgspec.structs.replace(
        drawn,
        item_atomic=sees_ahead,
        prompt_atomic=prompt_atomic,
        batch_tokens=drawn.batch_tokens + (60 if sees_ahead else 0),
        state_snapshots=places if keeps_state else None,
        drafts=not keeps_state,
        # Half of the models that can swap have swap memory, often too little.
        swap_blocks=0 if keeps_state or drawn.blocks % 2 else drawn.blocks * (drawn.waiting % 3),
        prefix_cache=drawn.prefix_cache and not (keeps_state and not places) and not prompt_atomic,
    )
