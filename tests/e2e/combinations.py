"""Configurations of admission, encoding and caching that cover all pairs of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product

from vsched.types import ModelInfo

FAMILIES = ("nano25", "nano3")
THRASHING_PAGES = 4
"""Embedding pages for thrashing: exactly the pages of the images of the largest request."""
PAGE_ROWS = 64

CORE: dict[str, dict[str, tuple[str, ...]]] = {
    "encoding": {
        "chunk-aware": (),
        "look-ahead": ("encode.encoding.look_ahead_chunks=1",),
        "eager": ("encode.encoding.look_ahead_chunks=100",),
    },
    "eviction": {
        "lru": (),
        "s3-fifo": ("encode.eviction.use=s3-fifo",),
        "none": ("encode.eviction.use=none",),
    },
    "embeddings": {"roomy": (), "thrashing": ()},
    "prefix": {"on": (), "off": ("generate.prefix_cache=false",)},
}
"""Factor, its values, and the settings of each."""


def admissions(stage: str) -> dict[str, tuple[str, ...]]:
    """Return the admission policies of a stage with settings small enough to bind."""
    chosen = {
        "fifo": (),
        "token-budget": ("max_tokens=128", "max_items=3"),
        "priority": ("max_tokens=128", "max_items=2", "ageing_s=0.05"),
    }
    return {
        name: tuple(f"{stage}.admission.{each}" for each in (f"use={name}", *fields))
        for name, fields in chosen.items()
    }


PAIRED: dict[str, dict[str, tuple[str, ...]]] = {
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
"""Further factors; each pair of values of any two factors is tried in some combination."""

FACTORS = CORE | PAIRED
Combination = dict[str, str]


def pairs(combination: Combination) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield every two (factor, value) of a combination."""
    return combinations(combination.items(), 2)


def _candidates() -> list[Combination]:
    """Return the whole product of the core, each with the other values that add most pairs, then the rarest."""
    seen: Counter[tuple[tuple[str, str], tuple[str, str]]] = Counter()
    rest = [dict(zip(PAIRED, values, strict=True)) for values in product(*PAIRED.values())]
    chosen = []
    for values in product(*CORE.values()):
        core = dict(zip(CORE, values, strict=True))

        def gain(other: Combination, core: Combination = core) -> tuple[int, int]:
            counts = [seen[pair] for pair in pairs(core | other)]
            return counts.count(0), -sum(counts)

        chosen.append(core | max(rest, key=gain))
        seen.update(pairs(chosen[-1]))
    return chosen


def all_combinations() -> list[Combination]:
    """Return a few of the candidates that cover all of their pairs."""
    candidates = _candidates()
    missing = {pair for one in candidates for pair in pairs(one)}
    chosen = []
    while missing:
        chosen.append(max(candidates, key=lambda one: len(missing.intersection(pairs(one)))))
        missing.difference_update(pairs(chosen[-1]))
    return chosen


def settings_of(combination: Combination, info: ModelInfo) -> list[str]:
    """Return the settings of a combination."""
    found = [line for factor, value in combination.items() for line in FACTORS[factor][value]]
    if combination["embeddings"] == "thrashing":
        size = THRASHING_PAGES * PAGE_ROWS * info.embedding_row_bytes
        found.append(f"arena.embedding_bytes={size}")
    return found


def name_of(combination: Combination) -> str:
    return " ".join(combination.values())
