"""Configurations of admission, encoding and caching that cover all pairs of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from vsched.types import ModelInfo

FAMILIES = ("nano25", "nano3")
THRASHING_PAGES = 4
"""Embedding pages for thrashing: exactly the pages of the images of the largest request."""
PAGE_ROWS = 64


def admissions(stage: str) -> dict[str, tuple[str, ...]]:
    """Return the admission policies of a stage with settings small enough to bind."""
    chosen = {
        "fifo": ("look_ahead=1",),
        "token-budget": ("max_tokens=128", "max_items=3", "look_ahead=2"),
        "gathered": ("max_tokens=160", "max_items=3", "deadline_s=0.003"),
        "priority": ("max_tokens=128", "max_items=2", "ageing_s=0.05"),
        "deadline": ("max_items=2", "default_target_ms=30", "lead_ms=5", "starvation_s=0.2"),
    }
    return {
        name: tuple(f"{stage}.admission.{each}" for each in (f"use={name}", *fields))
        for name, fields in chosen.items()
    }


FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "encoding": {
        "chunk-aware": (),
        "look-ahead": ("encode.encoding.look_ahead_chunks=1",),
        "eager": ("encode.encoding.use=eager",),
        "combined": ("encode.encoding.use=combined",),
    },
    "eviction": {
        "lru": (),
        "s3-fifo": ("encode.eviction.use=s3-fifo",),
        "none": ("encode.eviction.use=none",),
    },
    "embeddings": {"roomy": (), "thrashing": ()},
    "prefix": {"on": (), "off": ("generate.prefix_cache=false",)},
    "encode_admission": admissions("encode"),
    "generate_admission": admissions("generate"),
    "prefix_eviction": {
        "lru": (),
        "s3-fifo": ("generate.eviction.use=s3-fifo",),
        "none": ("generate.eviction.use=none",),
    },
    "features": {"raw": (), "brought": ("media.allow_embeddings=true",)},
    "family": dict.fromkeys(FAMILIES, ()),
}
"""Factors, their values, and the settings of each."""
Combination = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(combination: Combination) -> Iterator[Pair]:
    """Yield every two (factor, value) of a combination."""
    return combinations(combination.items(), 2)


def all_combinations() -> list[Combination]:
    """Return combinations that cover every pair of values of two factors, few of them."""
    missing = {
        ((one, value), (other, another))
        for one, other in combinations(FACTORS, 2)
        for value in FACTORS[one]
        for another in FACTORS[other]
    }
    uses: Counter[tuple[str, str]] = Counter()
    chosen: list[Combination] = []
    while missing:
        picked = dict(min(missing))
        for factor, values in FACTORS.items():
            if factor not in picked:
                picked[factor] = max(
                    values,
                    key=lambda value: (
                        len(missing.intersection(_pairs_with(picked, factor, value))),
                        -uses[factor, value],
                    ),
                )
        chosen.append({factor: picked[factor] for factor in FACTORS})
        missing.difference_update(pairs(chosen[-1]))
        uses.update(chosen[-1].items())
    return chosen


def _pairs_with(picked: Combination, factor: str, value: str) -> Iterator[Pair]:
    """Yield the pairs of a further value with each value that is picked already."""
    order = list(FACTORS)
    for other, another in picked.items():
        one, two = sorted(
            ((factor, value), (other, another)), key=lambda each: order.index(each[0])
        )
        yield one, two


def settings_of(combination: Combination, info: ModelInfo) -> list[str]:
    """Return the settings of a combination."""
    found = [line for factor, value in combination.items() for line in FACTORS[factor][value]]
    if combination["embeddings"] == "thrashing":
        size = THRASHING_PAGES * PAGE_ROWS * info.embedding_row_bytes
        found.append(f"arena.embedding_bytes={size}")
    return found


def name_of(combination: Combination) -> str:
    return " ".join(combination.values())
