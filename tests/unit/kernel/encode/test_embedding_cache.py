"""The embedding cache: counters, reclaim order, and properties inherited from requests."""

from __future__ import annotations

from typing import ClassVar

from tests.unit.kernel.setups import (
    assert_served,
    encode_statistics,
    image_request,
    make_limits,
)
from vsched.failures import EncodeErrorKind
from vsched.policy import Admission, AdmissionView, RequestPolicy
from vsched.testing import ModelCluster, default_policies


class Noting(RequestPolicy, frozen=True, kw_only=True):
    """Admits one after the other, and records the urgency of waiting images."""

    priorities: ClassVar[list[list[int]]] = []

    def admit(self, view: AdmissionView) -> Admission:
        self.priorities.append([entry.priority for entry in view.waiting])
        return Admission([0])


def test_image_is_as_urgent_as_the_most_urgent_of_its_requests() -> None:
    Noting.priorities.clear()
    policies = default_policies(encode_admission=Noting())
    cluster = ModelCluster(make_limits(encode_items=1), policies)
    cluster.submit(image_request("busy", (b"busy", 8)))
    cluster.submit(image_request("calm", (b"a", 8)))
    cluster.submit(image_request("urgent", (b"a", 8), priority=5))
    cluster.run_encode()
    assert Noting.priorities[-1] == [5]
    assert_served(cluster, "busy", "calm", "urgent")


def test_hits_are_counted_once_a_request() -> None:
    cluster = ModelCluster(make_limits(prefix_cache=False))
    for name in ("r1", "r2", "r3"):
        cluster.submit(image_request(name, (b"a", 8)))
        cluster.drain()
    statistics = encode_statistics(cluster)
    assert (statistics["cache_hits"], statistics["cache_misses"]) == (2, 1)


def test_images_of_a_failed_batch_are_like_others_once_they_are_encoded() -> None:
    """Otherwise a policy would never see their sizes again."""
    cluster = ModelCluster(make_limits())
    cluster.submit(image_request("r", (b"a", 8), (b"b", 8)))
    cluster.run_encode(fail=EncodeErrorKind.FAILED)
    cluster.drain()
    assert [entry.tokens for entry in cluster.kernel.embeddings] == [8, 8]
    assert_served(cluster, "r")


def test_policy_that_holds_keeps_images_of_a_failed_batch_back_as_well() -> None:
    class Once(RequestPolicy, frozen=True, kw_only=True):
        """Admits all at first, and then holds for a while."""

        def admit(self, view: AdmissionView) -> Admission:
            if view.now_ns < 1_000_000_000 and view.waiting[0].tokens is None:
                return Admission(hold_until_ns=1_000_000_000)
            return Admission(range(len(view.waiting)))

    cluster = ModelCluster(make_limits(), default_policies(encode_admission=Once()))
    cluster.submit(image_request("r", (b"a", 8), (b"b", 8)))
    cluster.run_encode(fail=EncodeErrorKind.FAILED)
    assert len(cluster.encoded) == 1
    assert_served(cluster, "r")
