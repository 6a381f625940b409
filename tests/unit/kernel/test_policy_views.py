"""Fields of a request that its client chose, in the views of all decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tests.unit.kernel.setups import assert_served, image_request, make_limits
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
from vsched.testing import ModelCluster, RequestAt, default_policies, run_policy
from vsched_policies.admission import Tiers

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


class Shows(Tiers, frozen=True, kw_only=True):
    """Notes what admission sees."""

    def admit(self, view: AdmissionView) -> Admission:
        SHOWN.append(view)
        return super().admit(view)


SHOWN: list[AdmissionView] = []


def test_waiting_request_is_shown_with_its_size_limits_and_deadline() -> None:
    SHOWN.clear()
    asked = RequestAt(text_tokens=10, images=(40, 6), output_tokens=20, ttft_target_ms=500)
    run_policy(Shows(), asked)
    image = SHOWN[0].waiting[0]
    assert SHOWN[0].stage == "encode"
    assert (image.tokens, image.images, image.max_tokens) == (40, 0, 0)
    view = SHOWN[-1]
    (entry,) = view.waiting
    assert (entry.tokens, entry.blocks * view.block_tokens) == (56, 64)
    assert (entry.images, entry.image_tokens, entry.max_tokens, entry.outputs) == (2, 46, 20, 0)
    assert image.target_ns == entry.target_ns == entry.arrived_ns + 500_000_000


def test_preempted_request_is_shown_with_the_tokens_that_it_has() -> None:
    SHOWN.clear()
    batch = RequestAt(text_tokens=10, images=(6,), output_tokens=50)
    run_policy(Shows(), batch, RequestAt(at_s=0.2, priority=1, output_tokens=30), slots=1)
    (running,) = next(view.running_requests for view in SHOWN if view.eligible)
    assert (running.images, running.max_tokens) == (1, 50)
    assert running.tokens == 16 + running.outputs
    back = SHOWN[-1].waiting[0]
    assert 10 < running.outputs <= back.outputs <= running.outputs + 2
    assert back.tokens == back.outputs, "the block of the prompt is cached"


def test_views_have_tenant_session_and_priority_of_the_request() -> None:
    SEEN.clear()
    seen = SeesRequests()
    policies = default_policies(
        arrival=seen,
        generate_admission=seen,
        step=seen,
        encoding=SeesImages(),
        insertion=SeesBlocks(),
        routing=SeesReplicas(),
        drafting=SeesDrafts(),
    )
    cluster = ModelCluster(make_limits(generators=2, drafts=True, chunk_tokens=16), policies)
    request = image_request("r", (b"image", 40), max_tokens=20, priority=3)
    cluster.arrive(msgspec.structs.replace(request, tenant="a", session="talk"))
    assert_served(cluster, "r")
    assert cluster.notices == []
    decisions = ("arrival", "routing", "encoding", "admission", "step", "drafting", "insertion")
    assert dict.fromkeys(decisions, ("a", "talk", 3)) == SEEN
