"""Front-door policies: admission of requests before any work is done for them."""

from vsched_policies.front_door.deadline_shed import DeadlineShed
from vsched_policies.front_door.open import Open
from vsched_policies.front_door.token_bucket import TokenBucket

__all__ = ["DeadlineShed", "Open", "TokenBucket"]
