"""Rows of live requests have reason, time and remedy of each wait; maps show every block and page."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import Gathering, image_request, make_limits, words
from vsched.failures import Simulated
from vsched.kernel import Scheduler
from vsched.kernel.events import Drain, Event, GroupLost
from vsched.kernel.live import CELL_SAMPLES_MAX, MAP_CELLS_MAX, MemoryMap, RequestRow
from vsched.policy import Admission, AdmissionView, RequestPolicy
from vsched.testing import ModelCluster, default_policies, make_request


def rows(cluster: ModelCluster, most: int = 100) -> dict[str, RequestRow]:
    """Rows by request."""
    found = cluster.kernel.live_requests(most, cluster.now_ns)
    return {row.request_id: row for row in found}


def test_request_without_a_slot_names_the_slots_and_those_ahead() -> None:
    cluster = ModelCluster(make_limits(slots=1))
    for name in ("running", "second", "third"):
        request = make_request(name, words(3))
        cluster.submit(msgspec.structs.replace(request, tenant="a"))
    found = rows(cluster)
    assert (found["running"].slot, found["second"].slot) == (0, -1)
    why = found["third"].why
    assert "all 1 slots are taken; requests ahead of it: 1" in why
    assert "Remedy: more generate.slots or replicas" in why
    assert found["third"].phase == "ready"
    assert found["third"].since_ns == found["third"].items_ready_ns
    assert cluster.kernel.tenants() == {"a": {"running": 1, "waiting": 2}}


def test_request_without_blocks_names_their_number() -> None:
    """Also if it is behind the one that lacks them."""
    cluster = ModelCluster(make_limits(blocks=6, block_size=4, prefix_cache=False))
    cluster.submit(make_request("running", words(16)))
    cluster.submit(make_request("large", words(20)))
    cluster.submit(make_request("small", words(2)))
    found = rows(cluster)
    assert "it needs 5 KV blocks, " in found["large"].why
    assert "the first in the queue needs 5 KV blocks" in found["small"].why


def test_held_queue_names_the_rest_of_the_hold() -> None:
    policies = default_policies(generate_admission=Gathering(deadline_s=2))
    cluster = ModelCluster(make_limits(), policies)
    cluster.submit(make_request("held", words(3)))
    why = rows(cluster)["held"].why
    assert "holds the queue for another 2.0 s" in why
    assert "Remedy: other fields of generate.admission" in why


class Last(RequestPolicy, frozen=True):
    """Admits nothing but the last request."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission([len(view.waiting) - 1] if view.waiting[-1].tenant == "vip" else [])


def test_request_that_is_passed_over_names_the_policy_and_the_limit() -> None:
    cluster = ModelCluster(make_limits(), default_policies(generate_admission=Last()))
    cluster.submit(msgspec.structs.replace(make_request("vip", words(3)), tenant="vip"))
    cluster.submit(make_request("passed", words(3)))
    why = rows(cluster)["passed"].why
    assert "lets others go first, for at most 60 s (policies.passed_over_max_s)" in why
    assert "Remedy: other fields of generate.admission, or another policy" in why


@pytest.mark.parametrize(
    ("event", "reason", "remedy"),
    [
        (GroupLost("generate", Simulated(("generate",))), "is down: its ranks", "another replica"),
        (Drain("generate"), "is draining: it takes no more work", "resume it"),
    ],
    ids=["lost", "draining"],
)
def test_request_of_a_group_that_is_not_up_names_its_state(
    event: Event, reason: str, remedy: str
) -> None:
    cluster = ModelCluster(make_limits(slots=1))
    cluster.submit(make_request("running", words(3)))
    cluster.submit(make_request("waiting", words(3)))
    cluster.kernel.handle(event, cluster.now_ns)
    why = rows(cluster)["waiting"].why
    assert reason in why
    assert remedy in why.partition("Remedy: ")[2]


def test_image_names_the_encoder_or_what_is_ahead_of_it() -> None:
    cluster = ModelCluster(make_limits(encode_items=1))
    cluster.submit(image_request("first", (b"a", 8)))
    cluster.submit(image_request("second", (b"b", 8)))
    found = rows(cluster)
    assert "items [0] of 1 are not encoded yet; encode encodes it, for " in found["first"].why
    assert "all 1 encode groups are busy; images ahead of it: 0" in found["second"].why
    assert found["second"].phase == "items"
    pages = cluster.kernel.embeddings.map()
    assert pages.totals[pages.states.index("encoding")] > 0


def test_rows_have_all_with_a_slot_and_the_oldest_others() -> None:
    cluster = ModelCluster(make_limits(slots=2))
    for number in range(6):
        cluster.submit(make_request(f"r{number}", words(3)))
    assert list(rows(cluster, most=3)) == ["r0", "r1", "r2"]


def shares(found: MemoryMap) -> list[float]:
    """Mean percentage of each state over all cells."""
    return [
        sum(cell[i] for cell in found.cells) / len(found.cells) for i in range(len(found.states))
    ]


def test_block_map_has_held_and_cached_blocks() -> None:
    cluster = ModelCluster(make_limits(blocks=20, block_size=4))
    cluster.submit(make_request("done", words(12)))
    cluster.drain()
    cluster.submit(make_request("running", words(8, start=500)))
    found = cluster.kernel.generators[0].block_map()
    statistics: dict[str, Any] = cluster.kernel.statistics()["generate"]
    assert found.totals == (statistics["blocks_held"], statistics["blocks_cached"])
    assert shares(found) == [100 * total / 20 for total in found.totals]
    assert found.totals[0] > 0 < found.totals[1]


def test_map_of_a_large_cache_is_bounded() -> None:
    limits = make_limits(blocks=1_000_000)
    kernel = Scheduler(limits, default_policies())
    found = kernel.generators[0].block_map()
    assert len(found.cells) <= MAP_CELLS_MAX
    assert found.per_cell > CELL_SAMPLES_MAX
    assert shares(found) == [0, 0]
