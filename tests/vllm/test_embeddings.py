"""The embedding cache of vLLM evicts as a policy says; with one that fails, as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vsched.integrations.vllm.embeddings import PolicyEncoderCache, logger
from vsched.policy import CachePolicy, EvictionOrder, Key
from vsched_policies.eviction import LruOrder

HERE = "tests.vllm.test_embeddings"
SIZES = {"a": 4, "b": 2, "c": 1, "d": 3}


class LargestOrder(LruOrder[Key]):
    """Evicts the largest entry."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[Key, int] = {}

    def add(self, key: Key, size: int) -> bool:
        self._sizes[key] = size
        return super().add(key, size)

    def victim(self) -> Key:
        return max(self._keys, key=self._sizes.__getitem__)


class Largest(CachePolicy, frozen=True, kw_only=True):
    """Evicts the largest entry."""

    def build_order(self) -> EvictionOrder[Key]:
        return LargestOrder[Key]()


class Broken(CachePolicy, frozen=True, kw_only=True):
    """Returns no order."""

    def build_order(self) -> EvictionOrder[Key]:
        raise RuntimeError("a bug")


def request(name: str) -> Any:
    """Return a request with one image of that name."""
    return SimpleNamespace(
        request_id=f"of {name}",
        mm_features=[SimpleNamespace(identifier=name)],
        get_num_encoder_embeds=lambda _: SIZES[name],
    )


def evicted(tables: Mapping[str, Any]) -> list[str]:
    """Use four images after one another in a cache for nine embeddings, then `a` again; return those evicted."""
    config = SimpleNamespace(additional_config={"vsched": tables})
    cache = PolicyEncoderCache.create_manager(cache_size=9, vllm_config=config)
    for name in ("b", "a", "c", "d", "a"):
        one = request(name)
        if not cache.check_and_update_cache(one, 0):
            assert cache.can_allocate(one, 0, 100, 0)
            cache.allocate(one, 0)
        cache.free(one)
    gone: list[str] = cache.freed
    return gone


@pytest.mark.parametrize(
    ("tables", "gone"),
    [
        ({}, ["b"]),
        ({"encode": {"eviction": {"use": "vsched_policies.eviction:Lru"}}}, ["b"]),
        ({"encode": {"eviction": {"use": f"{HERE}:Broken"}}}, ["b"]),
        ({"encode": {"eviction": {"use": f"{HERE}:Largest"}}}, ["a", "d"]),
    ],
)
def test_the_policy_names_the_embeddings_that_are_evicted(
    tables: Mapping[str, Any], gone: list[str]
) -> None:
    assert evicted(tables) == gone


def test_failures_of_the_policy_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: lines.append(text % values))
    evicted({"encode": {"eviction": {"use": f"{HERE}:Broken"}}})
    (line,) = lines
    assert line.startswith("policy Broken failed at test_embeddings.py:")
