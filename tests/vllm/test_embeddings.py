"""The embedding cache of vLLM evicts as a policy says; with one that fails, as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vsched.integrations.vllm.embeddings import PolicyEncoderCache, logger
from vsched.policy import CachePolicy, EvictionOrder, Key

HERE = "tests.vllm.test_embeddings"
SIZES = {"a": 4, "b": 2, "c": 1, "d": 3}


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
    """Use `b` twice and then three other images in a cache for nine embeddings; return those evicted."""
    config = SimpleNamespace(additional_config={"vsched": tables})
    cache = PolicyEncoderCache.create_manager(cache_size=9, vllm_config=config)
    for name in ("b", "b", "a", "c", "d"):
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
        ({"encode": {"eviction": {"use": "vsched_policies.eviction:S3Fifo"}}}, ["a"]),
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
