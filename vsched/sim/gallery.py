"""Gallery cases: small workloads, each with the policies to compare on it.

Everything depends on the case alone, so the figures are the same on every machine.

Tenants only serve to show figures separately: texts and images, chats and long documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from vsched.config import load_config
from vsched.plugins import resolve_policy
from vsched.policy import POLICY_TABLES, Policy
from vsched.sim.cost.model import load_cost_model
from vsched.sim.fast.metrics import SimulationOutcome, Targets, TenantFigures
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.generators import poisson
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Text, Workload, workload_of

SECOND_NS = 1_000_000_000


def _arrivals(
    tenant: str, times: Iterable[float], sizes: Callable[[Random, int], tuple[int, int, int]]
) -> Iterator[Arrival]:
    """Yield arrivals at times in seconds; `sizes` draws prompt, image and output tokens."""
    rng = Random(tenant)  # noqa: S311 - a workload that is the same every time
    for number, at_s in enumerate(times):
        text, image, outputs = sizes(rng, number)
        name = f"{tenant}-{number}"
        images = (Image(name, image),) if image else ()
        yield _arrival(tenant, name, at_s, (*images, Text(_content(tenant, number), text)), outputs)


def _arrival(
    tenant: str, name: str, at_s: float, prompt: tuple[PromptPart, ...], outputs: int
) -> Arrival:
    return Arrival(
        at_ns=int(at_s * SECOND_NS),
        request_id=name,
        prompt=prompt,
        output_tokens=outputs,
        tenant=tenant,
    )


def _content(tenant: str, number: int) -> int:
    """Return the number of a text that no other request sends."""
    return (1 << 42) + (sum(ord(letter) for letter in tenant) << 20 | number)


def _poisson(seed: str, rate: float, until_s: float) -> Iterator[float]:
    rng, gap, at_s = Random(seed), poisson(rate), 0.0  # noqa: S311 - a seeded workload
    while (at_s := at_s + gap(rng)) < until_s:
        yield at_s


def _conversations(
    tenant: str, *, rate: float, until_s: float, turns: int, every_s: float, image: int
) -> Iterator[Arrival]:
    """Yield conversations whose turns repeat all earlier ones, starting with an image if `image` is not 0 tokens."""
    rng = Random(tenant)  # noqa: S311 - a seeded workload
    for number, start_s in enumerate(_poisson(tenant, rate, until_s)):
        prompt: tuple[PromptPart, ...] = (Image(f"{tenant}-{number}", image),) if image else ()
        at_s = start_s
        for turn in range(turns):
            prompt = (*prompt, Text(_content(tenant, number * turns + turn), rng.randint(200, 600)))
            name = f"{tenant}-{number}-{turn}"
            yield _arrival(tenant, name, at_s, prompt, rng.randint(40, 120))
            at_s += every_s * rng.uniform(0.5, 1.5)


def image_burst() -> Workload:
    """Chats for half a minute, and 40 requests with a large image at 10 s."""
    texts = _arrivals(
        "texts", _poisson("texts", 8.0, 30.0), lambda rng, _: (300, 0, rng.randint(60, 180))
    )
    images = _arrivals("images", [10.0] * 40, lambda rng, _: (50, 2500, rng.randint(40, 120)))
    return workload_of("a burst of images", [*texts, *images])


def long_context() -> Workload:
    """Chats for 40 s next to a tenant that sends about 12,000 tokens every second."""
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
    """Twice the sustainable load for 30 s; a third is urgent, with a TTFT target of 1 s."""

    def urgent(arrival: Arrival) -> Arrival:
        return msgspec.structs.replace(arrival, priority=5, ttft_target_ms=1000)

    hurried = _arrivals("urgent", _poisson("urgent", 7.0, 30.0), _overload_sizes)
    batch = _arrivals("batch", _poisson("batch", 14.0, 30.0), _overload_sizes)
    return workload_of("an overload of 2x", [*map(urgent, hurried), *batch])


def _overload_sizes(rng: Random, _: int) -> tuple[int, int, int]:
    return rng.randint(200, 1400), 0, rng.randint(80, 240)


def conversations() -> Workload:
    """Conversations of six turns for a minute; half of them begin with an image."""
    texts = _conversations("texts", rate=3.0, until_s=40.0, turns=6, every_s=8.0, image=0)
    images = _conversations("images", rate=3.0, until_s=40.0, turns=6, every_s=8.0, image=1600)
    return workload_of("conversations", [*texts, *images])


def scan() -> Workload:
    """Conversations next to a tenant whose long documents are never repeated."""
    chats = _conversations("chat", rate=0.8, until_s=60.0, turns=6, every_s=8.0, image=0)
    scanned = _arrivals(
        "scan", _poisson("scan", 1.0, 80.0), lambda rng, _: (rng.randint(3000, 6000), 0, 20)
    )
    return workload_of("a scan next to conversations", [*chats, *scanned])


def long_answers() -> Workload:
    """Requests whose outputs outgrow the KV cache: some with long prompts, others with long outputs."""
    talks = _arrivals(
        "talks", _poisson("talks", 3.0, 40.0), lambda rng, _: (200, 0, rng.randint(400, 1000))
    )
    documents = _arrivals(
        "documents",
        _poisson("documents", 1.5, 40.0),
        lambda rng, _: (rng.randint(3000, 5000), 0, rng.randint(100, 300)),
    )
    return workload_of("answers that outgrow the KV cache", [*talks, *documents])


def albums() -> Workload:
    """Albums of eight large images next to single small ones."""

    def album(number: int, at_s: float) -> Arrival:
        shown = [
            part
            for index in range(8)
            for part in (
                Image(f"album-{number}-{index}", 2000),
                Text(_content("albums", number * 8 + index), 40),
            )
        ]
        return _arrival("albums", f"album-{number}", at_s, tuple(shown), 80)

    albums = [album(number, at_s) for number, at_s in enumerate(_poisson("albums", 0.9, 40.0))]
    single = _arrivals("single", _poisson("single", 6.0, 40.0), lambda rng, _: (60, 200, 60))
    return workload_of("albums and single images", [*albums, *single])


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
                "in-order": (("generate.step", {"use": "in-order"}),),
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
                "deadline-shed": (("arrival", {"use": "deadline-shed"}),),
                "deadline-shed + priority": (
                    ("arrival", {"use": "deadline-shed", "by_priority": True}),
                    ("generate.admission", {"use": "priority"}),
                ),
                "tenant-fair": (
                    (
                        "arrival",
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
            },
            shown=("single", "albums"),
        ),
    )
}


def run_choice(case: GalleryCase, label: str) -> SimulationOutcome:
    """Simulate a choice of a case."""
    policies = {
        table: resolve_policy(POLICY_TABLES.get(table, table), fields, path=table)
        for table, fields in case.choices[label]
    }
    return run_policies(case, label, policies)


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


COLOURS = ("#2563eb", "#ea580c")
FIGURE_SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,
    "font.size": 9,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titleweight": "bold",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


class GalleryMeasure(NamedTuple):
    """The quantity in a panel, for each tenant."""

    title: str
    unit: str
    value: Callable[[TenantFigures], float]


_FIRST = "Time to first token, {} (less is better)"
_P50 = GalleryMeasure(_FIRST.format("p50"), "ms", lambda one: one.ttft_ms.p50)
_P95 = GalleryMeasure(_FIRST.format("p95"), "ms", lambda one: one.ttft_ms.p95)
_GOOD = GalleryMeasure(
    f"Within targets: {TARGETS.ttft_ms:,.0f} ms or its own, {TARGETS.tpot_ms:.0f} ms a token",
    "% of all sent",
    lambda one: 100 * one.good_share,
)


def draw_case(case: GalleryCase, outcomes: Sequence[SimulationOutcome], path: Path) -> None:
    """Draw a PNG with a panel per measure, a group of bars per choice, and a bar per tenant; needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    labels = [one.label for one in outcomes]
    # Goodput is left out if nearly all requests meet the targets.
    measures = (_P50, _P95) if case.in_time else (_P95, _GOOD)
    height = 0.8 / len(case.shown)
    with mpl.rc_context(FIGURE_SETTINGS):
        figure = Figure(figsize=(10, 1.4 + 0.5 * len(outcomes)), layout="constrained")
        figure.suptitle(f"{case.title} (simulated, cost model {COST})")
        panels: Any = figure.subplots(1, len(measures), sharey=True)
        for axes, measure in zip(panels, measures, strict=True):
            for row, tenant in enumerate(case.shown):
                places = [index + (row + 0.5) * height - 0.4 for index in range(len(outcomes))]
                values = [measure.value(one.figures.tenants[tenant]) for one in outcomes]
                drawn = axes.barh(places, values, height * 0.95, color=COLOURS[row], label=tenant)
                axes.bar_label(drawn, fmt="{:,.0f}", size=7, padding=2)
            axes.set_yticks(range(len(outcomes)), labels)
            axes.set_xlabel(measure.unit)
            axes.set_title(measure.title, size=9)
            axes.margins(x=0.15)
        panels[0].invert_yaxis()
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
        figure.savefig(path, dpi=90)
