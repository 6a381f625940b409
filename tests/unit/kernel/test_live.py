"""Rows of live requests have reason, time and remedy of each wait; maps show every block and page."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.kernel.setups import Gathering, image_request, make_cluster, words
from vsched.failures import Simulated
from vsched.kernel.events import Drain, GroupLost
from vsched.kernel.live import CELL_SAMPLES_MAX, MAP_CELLS_MAX, MemoryMap, RequestRow
from vsched.policy import Admission, AdmissionView, RequestPolicy
from vsched.testing import ModelCluster, make_request
from vsched.types import Request


def rows(cluster: ModelCluster, most: int = 100) -> dict[str, RequestRow]:
    return {row.request_id: row for row in cluster.kernel.live_requests(most, cluster.now_ns)}


class Last(RequestPolicy, frozen=True):
    """Admits nothing but the last request."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission([len(view.waiting) - 1] if view.waiting[-1].tenant == "vip" else [])


TEXTS = [make_request(name, words(3)) for name in ("running", "second", "third")]
LARGE = [
    make_request(name, words(size)) for name, size in (("first", 16), ("big", 20), ("small", 2))
]
IMAGES = [image_request(name, (name.encode(), 8)) for name in ("one", "two")]
VIP = [msgspec.structs.replace(TEXTS[0], request_id="vip", tenant="vip"), TEXTS[0]]
OTHER_FIELDS = "Remedy: other fields of generate.admission"
PASSED = "lets others go first, for at most 60 s (policies.passed_over_max_s)"
WAITS: list[tuple[dict[str, Any], list[Request], str, list[str]]] = [
    ({"slots": 1}, TEXTS, "third",
     ["all 1 slots are taken; requests ahead of it: 1", "more generate.slots or replicas"]),
    ({"blocks": 6}, LARGE, "big", ["it needs 5 KV blocks, "]),
    ({"blocks": 6}, LARGE, "small", ["the first in the queue needs 5 KV blocks"]),
    ({"generate_admission": Gathering(deadline_s=2)}, TEXTS, "third",
     ["holds the queue for another 2.0 s", OTHER_FIELDS]),
    ({"generate_admission": Last()}, VIP, "running", [PASSED, OTHER_FIELDS]),
    ({"slots": 1, "event": GroupLost("generate", Simulated(("generate",)))}, TEXTS, "second",
     ["is down: its ranks", "Remedy: ", "another replica"]),
    ({"slots": 1, "event": Drain("generate")}, TEXTS, "second",
     ["is draining: it takes no more work", "Remedy: ", "resume it"]),
    ({"encode_items": 1}, IMAGES, "one", ["items [0] of 1 are not encoded yet; encode encodes it"]),
    ({"encode_items": 1}, IMAGES, "two", ["all 1 encode groups are busy; images ahead of it: 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "requests", "name", "said"), WAITS)
def test_row_of_a_waiting_request_has_reason_and_remedy(
    changes: dict[str, Any], requests: list[Request], name: str, said: list[str]
) -> None:
    """In this order."""
    changes = {"prefix_cache": False, **changes}
    event = changes.pop("event", None)
    cluster = make_cluster(*requests, **changes)
    if event is not None:
        cluster.kernel.handle(event, cluster.now_ns)
    why = rows(cluster)[name].why
    places = [why.find(words) for words in said]
    assert places == sorted(places), why
    assert places[0] >= 0, why


def test_rows_have_slot_phase_and_times() -> None:
    cluster = make_cluster(slots=1)
    for request in TEXTS:
        cluster.submit(msgspec.structs.replace(request, tenant="a"))
    found = rows(cluster)
    assert (found["running"].slot, found["second"].slot) == (0, -1)
    assert found["third"].phase == "ready"
    assert found["third"].since_ns == found["third"].items_ready_ns
    assert cluster.kernel.tenants() == {"a": {"running": 1, "waiting": 2}}
    cluster.submit(IMAGES[0])
    assert rows(cluster)["one"].phase == "items"
    pages = cluster.kernel.embeddings.map()
    assert pages.totals[pages.states.index("encoding")] > 0


def test_rows_have_all_with_a_slot_and_the_oldest_others() -> None:
    cluster = make_cluster(slots=2)
    for number in range(6):
        cluster.submit(make_request(f"r{number}", words(3)))
    assert list(rows(cluster, most=3)) == ["r0", "r1", "r2"]


def shares(found: MemoryMap) -> list[float]:
    """Mean percentage of each state over all cells."""
    return [
        sum(cell[i] for cell in found.cells) / len(found.cells) for i in range(len(found.states))
    ]


def test_block_map_has_held_and_cached_blocks() -> None:
    cluster = make_cluster(make_request("done", words(12)), blocks=20, block_size=4)
    cluster.drain()
    cluster.submit(make_request("running", words(8, start=500)))
    found = cluster.kernel.generators[0].block_map()
    statistics: dict[str, Any] = cluster.kernel.statistics()["generate"]
    assert found.totals == (statistics["blocks_held"], statistics["blocks_cached"])
    assert shares(found) == [100 * total / 20 for total in found.totals]
    assert found.totals[0] > 0 < found.totals[1]


def test_map_of_a_large_cache_is_bounded() -> None:
    found = make_cluster(blocks=1_000_000).kernel.generators[0].block_map()
    assert len(found.cells) <= MAP_CELLS_MAX
    assert found.per_cell > CELL_SAMPLES_MAX
    assert shares(found) == [0, 0]
