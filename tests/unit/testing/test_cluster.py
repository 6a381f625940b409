"""The model ranks detect a broken kernel: each oracle fails when its own property is broken."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.unit.kernel.policy_pool import random_policies
from vsched.kernel import request, request_moves
from vsched.kernel.encode.embedding_cache import EmbeddingCache, EmbeddingEntry
from vsched.kernel.generate.blocks import BlockPool
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.request import RequestState
from vsched.kernel.request_moves import RequestMoves
from vsched.kernel.scheduler import Scheduler
from vsched.testing import run_random
from vsched.types import MediaItem

Break = Callable[[pytest.MonkeyPatch], None]


def hash_without_items(patch: pytest.MonkeyPatch) -> None:
    real = request.chain_hashes

    def broken(tokens: array[int], items: Sequence[MediaItem], **rest: Any) -> list[bytes]:
        return real(tokens, [], **rest)

    patch.setattr(request, "chain_hashes", broken)


def hash_without_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_moves, "root_hash", lambda cache_salt, adapter: b"%d" % adapter)


def hash_without_adapter(patch: pytest.MonkeyPatch) -> None:
    real = request.root_hash
    patch.setattr(request_moves, "root_hash", lambda cache_salt, adapter: real(cache_salt))


def unpinned_pages(patch: pytest.MonkeyPatch) -> None:
    idle = property(lambda entry: bool(entry.pages) and not entry.claims)
    patch.setattr(EmbeddingCache, "_preemptible", lambda *_: [])
    patch.setattr(EmbeddingEntry, "is_idle", idle)


def leaked_blocks(patch: pytest.MonkeyPatch) -> None:
    real = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, held, **kept: real(self, held[:-1], **kept))


def early_chunks(patch: pytest.MonkeyPatch) -> None:
    real = GenerateGroup._chunk_stop

    def broken(
        self: GenerateGroup, state: RequestState, start: int, budget: int, *, room: int
    ) -> int:
        stop = real(self, state, start, budget, room=room)
        return min(stop + 1, start + budget, len(state.tokens))

    patch.setattr(GenerateGroup, "_chunk_stop", broken)


def lost_claims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestMoves, "drop_claims", lambda *_: None)


def cached_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestState, "tells_prompt", False)


def deaf_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestMoves, "_release_prompt", lambda *_: [])


def sleepy_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_break_stall", lambda *_: False)


def run_many(first: int) -> None:
    """Run the seed that finds the broken property at present, and then the others."""
    for seed in (*range(first, 300), *range(first)):
        rng = random.Random(seed)
        run_random(rng, random_policies(rng))


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        (hash_without_items, 297),
        (hash_without_salt, 0),
        (hash_without_adapter, 0),
        (unpinned_pages, 0),
        (leaked_blocks, 0),
        (early_chunks, 0),
        (lost_claims, 0),
        (cached_prompts, 52),
        (deaf_answers, 0),
        (sleepy_queue, 52),
    ],
)
def test_cluster_notices_a_broken_kernel(
    broken: Break, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_many(first)


def test_cluster_serves_with_the_kernel_as_it_is() -> None:
    clusters = [run_random(random.Random(seed)) for seed in range(10)]
    assert sum(len(cluster.ended) for cluster in clusters) > 20
