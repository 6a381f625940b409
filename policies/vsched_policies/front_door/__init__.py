"""Front-door policies: admission of requests before any work is done for them."""

from vsched_policies.front_door.deadline_shed import DeadlineShed
from vsched_policies.front_door.open import Open

__all__ = ["DeadlineShed", "Open"]
