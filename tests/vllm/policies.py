"""Policies that fail in each way, and one that reorders: for the tests inside vLLM."""

from __future__ import annotations

import time

import msgspec

from vsched.policy import (
    Admission,
    AdmissionView,
    PreemptionView,
    RequestPolicy,
    StepShares,
    StepView,
)

HERE = "tests.vllm.policies"


class Calls(msgspec.Struct):
    """Number of calls."""

    count: int = 0


class Bad(RequestPolicy, frozen=True, kw_only=True):
    """Raises, returns nonsense, and changes its state before it does."""

    state_type = Calls

    def admit(self, view: AdmissionView) -> Admission:
        """Raise, or return the same index twice."""
        view.state.count += 1
        if view.now_ns % 2:
            raise RuntimeError("a bug in a policy")
        return Admission([0, 0])

    def share(self, view: StepView) -> StepShares:
        """Name a request that is not there."""
        return StepShares([len(view.prefilling)])

    def victim(self, view: PreemptionView) -> int:
        return 1 // 0


class Slow(RequestPolicy, frozen=True, kw_only=True):
    """Sleeps in each call."""

    seconds: float = 0.02

    def admit(self, view: AdmissionView) -> Admission:
        time.sleep(self.seconds)
        return Admission([len(view.waiting) - 1])


class LastFirst(RequestPolicy, frozen=True, kw_only=True):
    """Serves the latest arrival first, everywhere, and takes blocks from the longest request."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(range(len(view.waiting))[::-1])

    def share(self, view: StepView) -> StepShares:
        """Prefill the latest one, 48 tokens at a time."""
        return StepShares(
            [len(view.prefilling) - 1] if view.prefilling else [], [48][: len(view.prefilling)]
        )

    def victim(self, view: PreemptionView) -> int:
        """Preempt the request with the most tokens that is eligible."""
        return max(view.eligible, key=lambda index: view.running[index].tokens)
