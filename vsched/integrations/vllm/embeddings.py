"""The embedding cache of vLLM with an eviction policy.

`--ec-manager-config '{"encoder_cache_manager_cls": "vsched.integrations.vllm.EmbeddingCache"}'`
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Self

import vllm
from vllm.logger import init_logger
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from vsched.integrations.vllm.settings import EMBEDDINGS, read_settings
from vsched.policy import CachePolicy
from vsched.policy_host import GuardedOrder, PolicyFaults

logger = init_logger("vllm.vsched")


class OrderedByPolicy(OrderedDict[str, int]):
    """Entries that can be evicted, with their sizes; `popitem` asks the policy."""

    def __init__(self, policy: CachePolicy) -> None:
        super().__init__()
        self.faults = PolicyFaults()
        self._policy = policy
        self._order: GuardedOrder[str] = GuardedOrder(policy, self.faults)
        self._log_failures()

    def _log_failures(self) -> None:
        for notice in self.faults.take_notices():
            logger.warning("%s", notice)

    def __setitem__(self, key: str, size: int) -> None:
        super().__setitem__(key, size)
        if not self._order.add(key, size):
            self.move_to_end(key, last=False)  # the policy does not keep it: it goes first
        self._log_failures()

    def pop(self, key: str) -> int:  # type: ignore[override]
        if key in self._order:
            self._order.reuse(key)
            self._log_failures()
        return super().pop(key)

    def popitem(self, last: bool = True) -> tuple[str, int]:
        del last
        first = next(iter(self))
        if len(self._order) == len(self):
            (first,) = self._order.take_victims(1)
            self._log_failures()
        return first, super().pop(first)

    def clear(self) -> None:
        super().clear()
        self._order = GuardedOrder(self._policy, self.faults)
        self._log_failures()


class PolicyEncoderCache(EncoderCacheManager):  # type: ignore[misc]
    """vLLM's manager of encoder outputs, which evicts as the policy of `encode.eviction` says."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> Self:
        """Create the manager; without a policy, it evicts like vLLM."""
        manager = cls(cache_size=cache_size)
        settings = read_settings(vllm_config, vllm.__version__, EMBEDDINGS)
        policy = settings.policies.by_table.get("encode.eviction")
        if isinstance(policy, CachePolicy):
            logger.info("encode.eviction: %r", policy)
            manager.freeable = OrderedByPolicy(policy)
        return manager
