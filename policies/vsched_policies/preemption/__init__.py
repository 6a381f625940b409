"""Preemption policies: the running request to preempt when KV blocks run out, and how it resumes."""

from vsched_policies.preemption.cheapest import Cheapest
from vsched_policies.preemption.reader_pace import ReaderPace
from vsched_policies.preemption.swap_long import SwapLong
from vsched_policies.preemption.youngest import Youngest

__all__ = ["Cheapest", "ReaderPace", "SwapLong", "Youngest"]
