"""The results of the gallery, which docs/policies.md quotes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from vsched.sim.fast.metrics import SimulationOutcome, TenantFigures
from vsched.sim.gallery import CASES, draw_case, run_choice


@cache
def outcome(case: str, label: str) -> SimulationOutcome:
    return run_choice(CASES[case], label)


def tenant(case: str, label: str, name: str) -> TenantFigures:
    figures = outcome(case, label).figures
    assert not figures.policy_faults
    return figures.tenants[name]


def test_short_requests_pass_images_by_default_and_more_under_shortest_first() -> None:
    """And `slo-feedback` shortens gaps between tokens."""
    labels = ("in-order", "fifo", "shortest-first")
    in_order, fifo, shortest = (tenant("image-burst", one, "texts").ttft_ms.p95 for one in labels)
    assert fifo < 0.6 * in_order
    assert shortest < fifo / 3
    before, after = (
        outcome("image-burst", one).figures.itl_ms.p99 for one in ("fifo", "slo-feedback")
    )
    assert after < before / 2


@pytest.mark.slow
@pytest.mark.thorough
def test_an_overload_is_decided_at_the_door_or_by_priority() -> None:
    good = {
        label: [tenant("overload", label, name).good_share for name in ("urgent", "batch")]
        for label in CASES["overload"].choices
    }
    assert max(good["fifo"]) < 0.2
    assert good["priority"][0] > 0.95 > 0.1 > good["priority"][1]
    assert good["deadline-shed"][1] > 0.6 > 0.1 > good["deadline-shed"][0]
    assert good["deadline-shed + priority"][0] > 0.95
    assert good["deadline-shed + priority"][1] > 3 * good["priority"][1]
    assert good["tenant-fair"][0] > 0.6 > good["tenant-fair"][1]


@pytest.mark.thorough
def test_images_are_encoded_once_if_conversations_stay_at_a_replica() -> None:
    loaded, affine = (
        outcome("conversations", one).figures for one in ("least-loaded", "image-affinity")
    )
    assert affine.prefix_hits > 1.8 * loaded.prefix_hits
    assert affine.images_encoded < 0.9 * loaded.images_encoded


@pytest.mark.thorough
def test_caching_for_returning_clients_halves_their_ttft() -> None:
    lru, none, matching = (tenant("scan", one, "chat") for one in ("lru", "none", "matching"))
    assert matching.ttft_ms.p50 < 0.6 * lru.ttft_ms.p50 < 0.6 * none.ttft_ms.p50


@pytest.mark.thorough
def test_small_victims_cost_least_if_computing_is_fast() -> None:
    youngest, cheapest, swapped = (
        tenant("long-answers", one, "talks").ttft_ms.p95
        for one in ("youngest", "cheapest", "youngest, swap")
    )
    assert cheapest < youngest < swapped


@pytest.mark.thorough
def test_small_images_wait_for_albums_that_are_encoded_early() -> None:
    aware, early = (tenant("albums", one, "single") for one in ("chunk-aware", "look-ahead"))
    assert aware.ttft_ms.p95 < 0.7 * early.ttft_ms.p95


def test_every_case_is_on_the_page_with_its_figure() -> None:
    page = Path("docs/policies.md").read_text()
    for case in CASES.values():
        assert f"images/policies-{case.name}.png" in page
        assert Path(f"docs/images/policies-{case.name}.png").exists()
        for label in case.choices:
            for name in label.replace(" + ", ", ").split(", "):
                assert f"`{name}" in page, (case.name, label)


def test_fair_sharing_protects_chats_from_long_contexts(tmp_path: Path) -> None:
    """As the figure shows."""
    fifo, fair = (tenant("long-context", one, "chat") for one in ("fifo", "tenant-fair"))
    assert fair.ttft_ms.p95 < 0.7 * fifo.ttft_ms.p95
    assert fair.ttft_ms.p50 < 0.95 * fifo.ttft_ms.p50
    pytest.importorskip("matplotlib")
    outcomes = [outcome("long-context", label) for label in ("fifo", "tenant-fair")]
    draw_case(CASES["long-context"], outcomes, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
