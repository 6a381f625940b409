"""Which waiting entries join the next step."""

from vsched_policies.admission.fifo import Fifo
from vsched_policies.admission.token_budget import TokenBudget

__all__ = ["Fifo", "TokenBudget"]
