"""Step policies: the prefilling requests that advance in a step, and their numbers of tokens."""

from vsched_policies.step.in_order import InOrder
from vsched_policies.step.slo_feedback import SloFeedback

__all__ = ["InOrder", "SloFeedback"]
