"""Builds KV caches in a generate rank, as the engine orders while it looks for their size.

Each order starts by tearing down the previous cache, and by checking that its memory was released: memory that a stray
reference keeps would be missing from every later attempt, and no smaller cache would help.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import msgspec

from vsched.errors import DeviceOutOfMemory
from vsched.memory import Sized
from vsched.policy import RankMemory
from vsched.types import ModelInfo
from vsched.wire import SizeKv
from vsched.worker.contract import GenerateWorker, ImagePlan
from vsched.worker.drafts import DraftWorker
from vsched.worker.memory import KV_REMEDY, memory_errors
from vsched.worker.profiling_run import StepLimits, measure_rank, run_profile, trial_adapter

LEAK_SLACK_BYTES = 1 << 20
"""Memory that may stay without being a leak: small allocations share pages with others."""

KEPT_MAX_BYTES = 64 << 20
"""Memory that libraries may keep after their first use, such as workspaces and tables."""


class KvBuilder:
    """The KV cache of one generate rank, until it is accepted; with a draft model, the caches of both.

    Attributes:
        blocks: Number of blocks of the current KV cache; 0 without one.
    """

    def __init__(
        self,
        worker: GenerateWorker,
        info: ModelInfo,
        limits: StepLimits,
        *,
        rank: int = 0,
        image: ImagePlan | None = None,
        draft: DraftWorker | None = None,
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        """Prepare; the weights are loaded.

        `image` fills the rows of the profiling run, None for text alone. `draft` has a KV cache of as many blocks, and
        a profiling run of its own.
        """
        self.blocks = 0
        self._workers = [worker] if draft is None else [worker, draft.worker]
        self._draft = draft
        self._collect = collect
        self._worker = worker
        self._info = info
        self._limits = limits
        self._rank = rank
        self._image = image
        self._memory = worker.device_memory()
        self._loaded_bytes: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of the current KV cache."""
        draft = 0 if self._draft is None else self._draft.info.kv_bytes_per_token
        return self.blocks * self._limits.block_size * (self._info.kv_bytes_per_token + draft)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots and of snapshots, which are built with the KV cache."""
        count = self._limits.slots + self._limits.state_snapshots
        return count * self._info.state_bytes if self.blocks else 0

    def measure(self) -> RankMemory:
        """Measure held and free memory; after loading, the memory policy starts from this."""
        self._collect()
        self._memory.release()
        self._loaded_bytes = self._memory.allocated()
        return self._measured()

    def carry_out(self, order: SizeKv) -> Sized:
        """Tear down the current KV cache, build the ordered one, and run the largest steps while headroom is held.

        The new cache remains until the next order, whatever the outcome; the headroom does not.
        """
        if order.renew:
            self._abort()
        expected = self.kv_bytes + self.state_bytes
        released = self._tear_down()
        message = self._leak(released, expected)
        if message:
            memory = self._measured(released_bytes=released)
            self._abort()
            return Sized(outcome="leak", message=message, memory=memory)
        if not order.tokens:
            return Sized(outcome="fits", message="", memory=self._measured(released_bytes=released))
        self._memory.reset_peak()
        doing = "building the KV cache"
        try:
            with memory_errors(doing, remedy=KV_REMEDY):
                self._build(order.tokens, touch=order.profile)
            doing = f"holding headroom of {order.headroom_bytes} bytes"
            with self._memory.hold(order.headroom_bytes):
                doing = "running the hardest steps"
                if order.profile:
                    with memory_errors(doing, remedy=KV_REMEDY):
                        self._run_profile(probe=order.probe)
                memory = self._measured(peak_bytes=self._memory.peak(), released_bytes=released)
                return Sized(outcome="fits", message="", memory=memory)
        except DeviceOutOfMemory as error:
            # Only its text is kept: the traceback refers to the memory of the failed step. The remedy is left out:
            # the policy has a better one.
            message = f"{doing} of {order.tokens} tokens: {error.summary}"
        self._abort()
        memory = self._measured(peak_bytes=self._memory.peak(), released_bytes=released)
        return Sized(outcome="out_of_memory", message=message, memory=memory)

    def _leak(self, released: int, expected: int) -> str:
        """Return what a teardown left behind, in a sentence; empty without a leak.

        A captured graph, an attention kernel or held headroom may stay although the KV cache was released. That is
        found by comparison with the memory after loading, with an allocator that keeps nothing for itself.
        """
        if released + LEAK_SLACK_BYTES < expected:
            return (
                "the KV cache was dropped and its memory did not come back (bytes released): "
                f"value {released}, limit at least {expected}"
            )
        if self._loaded_bytes is None or self._memory.drift(KEPT_MAX_BYTES):
            return ""
        kept = self._memory.allocated() - self._loaded_bytes
        if kept <= KEPT_MAX_BYTES:
            return ""
        return (
            "more memory is in use than after loading, without a KV cache (bytes): "
            f"value {kept}, limit {KEPT_MAX_BYTES}"
        )

    def settle(self) -> None:
        """Note that the current KV cache is accepted."""
        self._memory.settle()

    def _abort(self) -> None:
        """Make the steps of peers fail, too: they may wait for this rank in one."""
        for worker in self._workers:
            worker.abort()

    def _tear_down(self) -> int:
        """Drop graphs and KV caches; return the number of released bytes.

        In this order: captured graphs point into the request state and the cache, request state into the cache. The
        requests of the profiling run were dropped with its rank.
        """
        self._collect()
        before = self._memory.allocated()
        for worker in self._workers:
            worker.drop_graphs()
            worker.drop_kv()
        self.blocks = 0
        self._collect()
        released = before - self._memory.allocated()
        self._memory.release()
        return released

    def _build(self, tokens: int, *, touch: bool) -> None:
        blocks = tokens // self._limits.block_size
        assert blocks, "the engine orders at least one block"
        for worker in self._workers:
            worker.build_kv(blocks=blocks, block_size=self._limits.block_size, touch=touch)
        self.blocks = blocks

    def _run_profile(self, *, probe: bool) -> None:
        limits = self._limits
        if not probe:
            # A sequence longer than the cache is refused when it arrives. A probe stands for caches of any size.
            tokens = self.blocks * limits.block_size
            limits = msgspec.structs.replace(
                limits, context_tokens=min(limits.context_tokens, tokens)
            )
        with trial_adapter(self._worker) as adapter:
            run_profile(
                self._worker,
                self._info,
                limits,
                blocks=self.blocks,
                image=self._image,
                adapter=adapter,
            )
        if self._draft is not None:
            worker, info = self._draft
            context = min(limits.context_tokens, info.context_tokens)
            own = msgspec.structs.replace(limits, context_tokens=context)
            run_profile(worker, info, own, blocks=self.blocks, image=None)

    def _measured(self, *, peak_bytes: int = 0, released_bytes: int = 0) -> RankMemory:
        return msgspec.structs.replace(
            measure_rank(self._worker, self._rank),
            draft_bytes=0 if self._draft is None else self._draft.worker.weights_bytes,
            peak_bytes=peak_bytes,
            kv_bytes=self.kv_bytes,
            state_bytes=self.state_bytes,
            released_bytes=released_bytes,
        )
