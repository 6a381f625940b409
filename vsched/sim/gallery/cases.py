"""The cases of the gallery: small workloads, and the policies that somebody would choose between on each.

The requests of a case belong to tenants, which only name what is looked at apart: texts and images, chats and long
documents. Everything is a function of the case: the same figures come out on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from vsched.config import load_config
from vsched.config.sections import POLICY_TABLES
from vsched.plugins import resolve_policy
from vsched.sim.cost.model import load_cost_model
from vsched.sim.fast.metrics import SimulationOutcome, Targets
from vsched.sim.fast.run import simulate
from vsched.sim.workload.generators import poisson
from vsched.sim.workload.requests import Arrival, Image, Text, Workload, workload_of

COST = "h100-7b"
SETTINGS = (
    "encode.device=cuda:0",
    "arena.pixel_bytes=8000000000",
    "generate.max_waiting_bytes=8000000000",
)
TARGETS = Targets(ttft_ms=2000.0, tpot_ms=50.0)
SECOND_NS = 1_000_000_000
PolicyChange = tuple[str, Mapping[str, Any]]
"""A policy table, and what stands in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryCase:
    """A workload, and choices to compare on it.

    Attributes:
        title: What happens.
        workload: Makes the requests.
        settings: Keys of the configuration beside those of all cases.
        choices: By label; the first is the default.
        shown: Tenants that figures show, in order.
    """

    name: str
    title: str
    workload: Callable[[], Workload]
    settings: tuple[str, ...] = ()
    choices: Mapping[str, tuple[PolicyChange, ...]]
    shown: tuple[str, ...]


def _arrivals(
    tenant: str, times: Iterator[float], sizes: Callable[[Random, int], tuple[int, int, int]]
) -> Iterator[Arrival]:
    """Yield arrivals at times in seconds; `sizes` draws prompt, image and output tokens."""
    rng = Random(tenant)  # noqa: S311 - a workload that is the same every time
    for number, at_s in enumerate(times):
        text, image, outputs = sizes(rng, number)
        name = f"{tenant}-{number}"
        images = (Image(name, image),) if image else ()
        content = sum(ord(letter) for letter in tenant) << 20 | number
        yield Arrival(
            at_ns=int(at_s * SECOND_NS),
            request_id=name,
            prompt=(*images, Text((1 << 42) + content, text)),
            output_tokens=outputs,
            tenant=tenant,
        )


def _poisson(seed: str, rate: float, until_s: float) -> Iterator[float]:
    rng, gap, at_s = Random(seed), poisson(rate), 0.0  # noqa: S311 - a seeded workload
    while (at_s := at_s + gap(rng)) < until_s:
        yield at_s


def image_burst() -> Workload:
    """Return chats for half a minute, and 40 requests with a large image at 10 s."""
    texts = _arrivals(
        "texts", _poisson("texts", 8.0, 30.0), lambda rng, _: (300, 0, rng.randint(60, 180))
    )
    images = _arrivals("images", iter([10.0] * 40), lambda rng, _: (50, 2500, rng.randint(40, 120)))
    return workload_of("a burst of images", [*texts, *images])


def long_context() -> Workload:
    """Return chats for 40 s beside a tenant who sends 12,000 tokens every second or so."""
    chats = _arrivals(
        "chat",
        _poisson("chat", 5.0, 40.0),
        lambda rng, _: (rng.randint(100, 500), 0, rng.randint(60, 180)),
    )
    long = _arrivals(
        "long", _poisson("long", 1.2, 40.0), lambda rng, _: (rng.randint(9000, 15000), 0, 60)
    )
    return workload_of("a long-context tenant", [*chats, *long])


def overload() -> Workload:
    """Return twice as much as can be served, for 30 s; a third is urgent and has a target of 1 s."""

    def urgent(arrival: Arrival) -> Arrival:
        return msgspec.structs.replace(arrival, priority=5, ttft_target_ms=1000)

    hurried = _arrivals("urgent", _poisson("urgent", 7.0, 30.0), _overload_sizes)
    batch = _arrivals("batch", _poisson("batch", 14.0, 30.0), _overload_sizes)
    return workload_of("an overload of 2x", [*map(urgent, hurried), *batch])


def _overload_sizes(rng: Random, _: int) -> tuple[int, int, int]:
    return rng.randint(200, 1400), 0, rng.randint(80, 240)


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
                "shortest-prefill": (("generate.step", {"use": "shortest-prefill"}),),
                "slo-feedback": (("generate.step", {"use": "slo-feedback", "itl_target_ms": 30}),),
            },
            shown=("texts", "images"),
        ),
        GalleryCase(
            name="long-context",
            title="Chats beside a tenant of 9,000 to 15,000 tokens",
            workload=long_context,
            settings=("generate.slots=16",),
            choices={
                "fifo": (),
                "fair-share": (("generate.admission", {"use": "fair-share"}),),
                "fair-prefill": (("generate.step", {"use": "fair-prefill"}),),
                "shortest-prefill": (("generate.step", {"use": "shortest-prefill"}),),
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
                "deadline": (("generate.admission", {"use": "deadline"}),),
                "deadline-shed": (("front_door", {"use": "deadline-shed"}),),
                "token-bucket": (
                    (
                        "front_door",
                        {"use": "token-bucket", "rate": 3.0, "burst": 10, "rates": {"urgent": 7.0}},
                    ),
                ),
            },
            shown=("urgent", "batch"),
        ),
    )
}


def run_case(case: GalleryCase, labels: tuple[str, ...] = ()) -> list[SimulationOutcome]:
    """Simulate the choices of a case, all or those that are named."""
    config = load_config(None, sets=(*SETTINGS, *case.settings), environ={})
    cost, workload = load_cost_model(COST), case.workload()
    outcomes = []
    for label, changes in case.choices.items():
        if labels and label not in labels:
            continue
        policies = {
            table: resolve_policy(POLICY_TABLES[table], fields, path=table)
            for table, fields in changes
        }
        outcomes.append(
            simulate(config, workload, cost=cost, label=label, policies=policies, targets=TARGETS)
        )
    return outcomes


DEFAULTS = {("admission", "fifo"), ("step", "in-order"), ("front_door", "open")}
"""The policies of the choice that changes nothing, which every case has."""


def case_of(kind: str, name: str) -> GalleryCase | None:
    """Return the case in which a policy is one of the choices; None where none shows it."""
    for case in CASES.values():
        for changes in case.choices.values():
            if any(
                POLICY_TABLES[table] == kind and fields["use"] == name for table, fields in changes
            ):
                return case
    return CASES["long-context"] if (kind, name) in DEFAULTS else None
