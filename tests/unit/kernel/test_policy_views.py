"""Fields of a request that its client chose, in the views of all decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tests.unit.kernel.setups import assert_served, image_request, make_cluster
from vsched.policy import (
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    CachePolicy,
    Draft,
    DraftingPolicy,
    DraftingView,
    EncodingView,
    ImagePolicy,
    InsertionView,
    RequestPolicy,
    RoutingPolicy,
    RoutingView,
    StepShares,
    StepView,
)

SEEN: dict[str, tuple[str, str, int]] = {}


def see(decision: str, one: Any) -> None:
    SEEN[decision] = one.tenant, one.session, one.priority


class SeesRequests(RequestPolicy, frozen=True, kw_only=True):
    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        see("arrival", view.request)
        return Admit()

    def admit(self, view: AdmissionView) -> Admission:
        see("admission", view.waiting[0])
        return Admission(range(len(view.waiting)))

    def share(self, view: StepView) -> StepShares:
        see("step", view.prefilling[0])
        return StepShares(range(len(view.prefilling)))


class SeesImages(ImagePolicy, frozen=True, kw_only=True):
    def select(self, view: EncodingView) -> Sequence[int]:
        see("encoding", view)
        return view.needed


class SeesBlocks(CachePolicy, frozen=True, kw_only=True):
    def keep(self, view: InsertionView) -> int:
        see("insertion", view)
        return 0


class SeesReplicas(RoutingPolicy, frozen=True, kw_only=True):
    def choose(self, view: RoutingView) -> int:
        see("routing", view)
        return 0


class SeesDrafts(DraftingPolicy, frozen=True, kw_only=True):
    def grant(self, view: DraftingView) -> Draft:
        see("drafting", view)
        return Draft()


def test_views_have_tenant_session_and_priority_of_the_request() -> None:
    SEEN.clear()
    seen = SeesRequests()
    cluster = make_cluster(
        generators=2,
        drafts=True,
        chunk_tokens=16,
        arrival=seen,
        generate_admission=seen,
        step=seen,
        encoding=SeesImages(),
        insertion=SeesBlocks(),
        routing=SeesReplicas(),
        drafting=SeesDrafts(),
    )
    request = image_request("r", (b"image", 40), max_tokens=20, priority=3)
    cluster.arrive(msgspec.structs.replace(request, tenant="a", session="talk"))
    assert_served(cluster, "r")
    assert cluster.notices == []
    decisions = ("arrival", "routing", "encoding", "admission", "step", "drafting", "insertion")
    assert dict.fromkeys(decisions, ("a", "talk", 3)) == SEEN
