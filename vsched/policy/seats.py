"""Tables of the decisions that policies make, and of the seats: the configuration tables that select a policy for each.

Used by configuration, kernel, simulators, commands and documentation.
"""

from __future__ import annotations

import inspect

import msgspec

from vsched.policy.base import Policy
from vsched.policy.cache import CachePolicy
from vsched.policy.drafter import DraftingPolicy
from vsched.policy.images import ImagePolicy
from vsched.policy.memory import MemoryPolicy
from vsched.policy.requests import RequestPolicy
from vsched.policy.router import RoutingPolicy


class Decision(msgspec.Struct, frozen=True):
    """A decision: one method of a policy class.

    Attributes:
        base: The class that declares the method.
        remembers: False if the method gets no state: a memory policy is a generator, an eviction order is an object.
        yields: Whether the method is a generator.
    """

    base: type[Policy]
    method: str
    remembers: bool = True
    yields: bool = False


DECISIONS = {
    "admission": Decision(RequestPolicy, "admit"),
    "encoding": Decision(ImagePolicy, "select"),
    "eviction": Decision(CachePolicy, "build_order", remembers=False),
    "memory": Decision(MemoryPolicy, "plan", remembers=False, yields=True),
    "routing": Decision(RoutingPolicy, "choose"),
    "preemption": Decision(RequestPolicy, "victim"),
    "drafting": Decision(DraftingPolicy, "grant"),
    "step": Decision(RequestPolicy, "share"),
    "front_door": Decision(RequestPolicy, "arrive"),
    "dispatch": Decision(ImagePolicy, "dispatch"),
    "reclaim": Decision(ImagePolicy, "reclaim"),
    "insertion": Decision(CachePolicy, "keep"),
}
"""Decisions by name, which is also the name of their entry points: `vsched.admission`."""


class Seat(msgspec.Struct, frozen=True):
    """A configuration table that names the policy of a decision.

    Attributes:
        table: Path of the table.
        decision: Key in `DECISIONS`.
        field: Field of `KernelPolicies`; empty for the memory policy, which runs before there is a kernel.
    """

    table: str
    decision: str
    field: str


SEATS = (
    Seat("encode.admission", "admission", "encode_admission"),
    Seat("encode.encoding", "encoding", "encoding"),
    Seat("encode.dispatch", "dispatch", "dispatch"),
    Seat("encode.eviction", "eviction", "embedding_eviction"),
    Seat("encode.reclaim", "reclaim", "reclaim"),
    Seat("generate.admission", "admission", "generate_admission"),
    Seat("generate.memory", "memory", ""),
    Seat("generate.preemption", "preemption", "preemption"),
    Seat("generate.eviction", "eviction", "prefix_eviction"),
    Seat("generate.insertion", "insertion", "insertion"),
    Seat("generate.drafting", "drafting", "drafting"),
    Seat("generate.step", "step", "step"),
    Seat("routing", "routing", "routing"),
    Seat("front_door", "front_door", "front_door"),
)
POLICY_TABLES = {seat.table: seat.decision for seat in SEATS}
"""Decision of each policy table."""
SEVERAL = "policy"
"""The table of one policy that makes several decisions with one state."""
TABLES = (*POLICY_TABLES, SEVERAL)


def decisions_of(cls: type[Policy]) -> list[str]:
    """Return the names of the decisions whose methods a class overrides."""
    return [
        name
        for name, decision in DECISIONS.items()
        if issubclass(cls, decision.base)
        and inspect.getattr_static(cls, decision.method)
        is not inspect.getattr_static(decision.base, decision.method)
    ]
