"""The default policies of a server, by name, since this package may not import them."""

from __future__ import annotations

from functools import cache
from typing import Any

from vsched.kernel import KernelPolicies
from vsched.plugins import check_contract, resolve_policy
from vsched.policy import SEATS, SEVERAL, Policy, decisions_of

DEFAULTS = {
    "encode_admission": ("admission", "token-budget"),
    "generate_admission": ("admission", "fifo"),
    "encoding": ("encoding", "chunk-aware"),
    "dispatch": ("dispatch", "fewest-held-up"),
    "embedding_eviction": ("eviction", "lru"),
    "reclaim": ("reclaim", "youngest"),
    "prefix_eviction": ("eviction", "lru"),
    "insertion": ("insertion", "everything"),
    "preemption": ("preemption", "youngest"),
    "drafting": ("drafting", "forced-tokens"),
    "step": ("step", "in-order"),
    "routing": ("routing", "round-robin"),
    "front_door": ("front_door", "open"),
}
"""Kind and registered name of each policy that the kernel calls."""


def default_policies(policy: Policy | None = None, /, **changes: Policy) -> KernelPolicies:
    """Return the default policies of a server, with replacements by field name.

    A positional `policy` makes all decisions that it has methods for, with one state if there are several.

    Raises:
        PolicyError: When the policy does not meet its contract.
    """
    policies: dict[str, Any] = {
        place: _resolve(kind, name) for place, (kind, name) in DEFAULTS.items()
    }
    if policy is not None:
        check_contract(type(policy), SEVERAL)
        made = decisions_of(type(policy))
        changes = {
            seat.field: policy for seat in SEATS if seat.field and seat.decision in made
        } | changes
        if len(made) > 1:
            policies["several"] = policy
    return KernelPolicies(**{"build": resolve_policy, **policies, **changes})


@cache
def _resolve(kind: str, name: str) -> Policy:
    return resolve_policy(kind, {"use": name})
