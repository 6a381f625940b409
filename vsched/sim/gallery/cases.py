"""Gallery cases: small workloads, each with the policies to compare on it.

Everything depends on the case alone, so the figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vsched.config import load_config
from vsched.plugins import resolve_policy
from vsched.policy import POLICY_TABLES, Policy
from vsched.sim.cost.model import load_cost_model
from vsched.sim.fast.metrics import SimulationOutcome, Targets
from vsched.sim.fast.run import simulate
from vsched.sim.gallery.workloads import (
    albums,
    conversations,
    image_burst,
    long_answers,
    long_context,
    overload,
    scan,
)
from vsched.sim.workload.requests import Workload

COST = "h100-7b"
SETTINGS = (
    "encode.device=cuda:0",
    "arena.pixel_bytes=8000000000",
    "generate.max_waiting_bytes=8000000000",
)
TARGETS = Targets(ttft_ms=2000.0, tpot_ms=50.0)
PolicyChange = tuple[str, Mapping[str, Any]]
"""A policy table and its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryCase:
    """A workload and the policies to compare on it.

    Attributes:
        title: Description of the workload.
        workload: Creates the requests.
        settings: Configuration keys in addition to the common ones.
        choices: Policy changes by label; the first is the default.
        shown: Tenants in the figures, in order.
        kv_tokens: KV cache tokens of a replica, if not the cost model's.
        in_time: Whether nearly all requests meet the targets under every choice.
    """

    name: str
    title: str
    workload: Callable[[], Workload]
    settings: tuple[str, ...] = ()
    choices: Mapping[str, tuple[PolicyChange, ...]]
    shown: tuple[str, ...]
    kv_tokens: int | None = None
    in_time: bool = False


CASES: dict[str, GalleryCase] = {
    case.name: case
    for case in (
        GalleryCase(
            name="image-burst",
            title="Chats, and 40 large images at once at 10 s",
            workload=image_burst,
            choices={
                "fifo": (),
                "token-budget": (("generate.admission", {"use": "token-budget"}),),
                "shortest-first": (("generate.admission", {"use": "shortest-first"}),),
                "slo-feedback": (("generate.step", {"use": "slo-feedback", "itl_target_ms": 30}),),
            },
            shown=("texts", "images"),
        ),
        GalleryCase(
            name="long-context",
            title="Chats next to a tenant with prompts of 9,000 to 15,000 tokens",
            workload=long_context,
            settings=("generate.slots=16",),
            choices={
                "fifo": (),
                "tenant-fair": (("policy", {"use": "tenant-fair"}),),
                "slo-feedback": (("generate.step", {"use": "slo-feedback", "itl_target_ms": 30}),),
            },
            shown=("chat", "long"),
        ),
        GalleryCase(
            name="overload",
            title="Twice the load that can be served; a third is urgent, due in 1 s",
            workload=overload,
            settings=("generate.slots=16",),
            choices={
                "fifo": (),
                "priority": (("generate.admission", {"use": "priority"}),),
                "deadline-shed": (("front_door", {"use": "deadline-shed"}),),
                "deadline-shed + priority": (
                    ("front_door", {"use": "deadline-shed", "by_priority": True}),
                    ("generate.admission", {"use": "priority"}),
                ),
                "tenant-fair": (
                    (
                        "front_door",
                        {"use": "tenant-fair", "rate": 3.0, "burst": 10, "rates": {"urgent": 7.0}},
                    ),
                ),
            },
            shown=("urgent", "batch"),
        ),
        GalleryCase(
            name="conversations",
            title="Conversations of six turns, half of them about an image, on three replicas",
            workload=conversations,
            settings=("generate.replicas=3",),
            kv_tokens=120_000,
            in_time=True,
            choices={
                "least-loaded": (),
                "round-robin": (("routing", {"use": "round-robin"}),),
                "image-affinity": (("routing", {"use": "image-affinity"}),),
            },
            shown=("texts", "images"),
        ),
        GalleryCase(
            name="scan",
            title="Conversations next to a tenant whose long documents are never repeated",
            workload=scan,
            kv_tokens=48_000,
            in_time=True,
            choices={
                "lru": (),
                "s3-fifo": (("generate.eviction", {"use": "s3-fifo"}),),
                "none": (("generate.eviction", {"use": "none"}),),
                "matching": (("generate.insertion", {"use": "matching", "tenants": ["chat"]}),),
            },
            shown=("chat", "scan"),
        ),
        GalleryCase(
            name="long-answers",
            title="Answers that outgrow a KV cache of 24,000 tokens",
            workload=long_answers,
            settings=("generate.swap_memory=4GiB",),
            kv_tokens=24_000,
            choices={
                "youngest": (),
                "cheapest": (("generate.preemption", {"use": "cheapest"}),),
                "youngest, swap": (("generate.preemption", {"use": "youngest", "mode": "swap"}),),
                "swap-long": (("generate.preemption", {"use": "swap-long"}),),
            },
            shown=("talks", "documents"),
        ),
        GalleryCase(
            name="albums",
            title="Albums of eight large images and single small ones, on two encode replicas",
            workload=albums,
            settings=("encode.replicas=2",),
            choices={
                "chunk-aware": (),
                "look-ahead": (
                    ("encode.encoding", {"use": "chunk-aware", "look_ahead_chunks": 100}),
                ),
                "combined": (("encode.encoding", {"use": "combined"}),),
            },
            shown=("single", "albums"),
        ),
    )
}


def run_case(case: GalleryCase, labels: tuple[str, ...] = ()) -> list[SimulationOutcome]:
    """Simulate the choices of a case: all, or the named ones."""
    return [
        run_policies(case, label, policies_of(changes))
        for label, changes in case.choices.items()
        if not labels or label in labels
    ]


def policies_of(changes: Iterable[PolicyChange]) -> dict[str, Policy]:
    """Build the policies of a choice, by table."""
    return {
        table: resolve_policy(POLICY_TABLES.get(table, table), fields, path=table)
        for table, fields in changes
    }


def run_policies(
    case: GalleryCase, label: str, policies: Mapping[str, Policy], **options: Any
) -> SimulationOutcome:
    """Simulate a case with these policies, by table; further options are those of `simulate`."""
    return simulate(
        load_config(None, sets=(*SETTINGS, *case.settings), environ={}),
        case.workload(),
        cost=load_cost_model(COST),
        label=label,
        policies=policies,
        targets=TARGETS,
        kv_tokens=case.kv_tokens,
        **options,
    )


DEFAULTS = {
    ("admission", "fifo"): "long-context",
    ("step", "in-order"): "long-context",
    ("front_door", "open"): "overload",
    ("routing", "least-loaded"): "conversations",
    ("eviction", "lru"): "scan",
    ("insertion", "everything"): "scan",
    ("encoding", "chunk-aware"): "albums",
    ("dispatch", "fewest-held-up"): "albums",
}
"""Cases that show the default policy of each kind, which needs no change of tables."""


def case_of(kind: str, name: str) -> GalleryCase | None:
    """Return the case that compares a policy; None if there is none."""
    for case in CASES.values():
        for changes in case.choices.values():
            if any(
                POLICY_TABLES.get(table, table) == kind and fields["use"] == name
                for table, fields in changes
            ):
                return case
    default = DEFAULTS.get((kind, name))
    return None if default is None else CASES[default]
