"""Admission policies: the waiting entries that join the next step."""

from vsched_policies.admission.deadline import Deadline
from vsched_policies.admission.fifo import Fifo
from vsched_policies.admission.gathered import Gathered
from vsched_policies.admission.priority import Priority
from vsched_policies.admission.shortest_first import ShortestFirst
from vsched_policies.admission.token_budget import TokenBudget

__all__ = [
    "Deadline",
    "Fifo",
    "Gathered",
    "Priority",
    "ShortestFirst",
    "TokenBudget",
]
