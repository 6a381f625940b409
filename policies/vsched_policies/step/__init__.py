"""Step policies: the prefilling requests that advance in a step, and their numbers of tokens."""

from vsched_policies.step.fair_prefill import FairPrefill
from vsched_policies.step.in_order import InOrder
from vsched_policies.step.shortest_prefill import ShortestPrefill
from vsched_policies.step.slo_feedback import SloFeedback

__all__ = ["FairPrefill", "InOrder", "ShortestPrefill", "SloFeedback"]
