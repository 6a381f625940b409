"""The dispatch policy assigns images to encode groups, and the kernel ensures that all are encoded."""

from __future__ import annotations

from typing import ClassVar

from tests.unit.kernel.setups import assert_served, image_request, make_limits
from vsched.policy import Dispatch, DispatchView, ImagePolicy
from vsched.testing import ModelCluster, default_policies, make_request

SECOND_NS = 1_000_000_000


class Watched(ImagePolicy, frozen=True, kw_only=True):
    """The last free group, and all images; records its views."""

    views: ClassVar[list[DispatchView]] = []
    waiting: ClassVar[list[list[int | None]]] = []

    def dispatch(self, view: DispatchView) -> Dispatch:
        self.views.append(view)
        self.waiting.append([entry.tokens for entry in view.waiting])
        return Dispatch(max(index for index, group in enumerate(view.groups) if group.free))


class Behind(ImagePolicy, frozen=True, kw_only=True):
    """Never the front while there is another, otherwise nothing while something is encoded."""

    def dispatch(self, view: DispatchView) -> Dispatch:
        free = next(index for index, group in enumerate(view.groups) if group.free)
        if len(view.waiting) > 1:
            return Dispatch(free, range(1, len(view.waiting)))
        return Dispatch(None if any(group.items for group in view.groups) else free)


def out(cluster: ModelCluster) -> dict[str, list[bytes]]:
    """Keys of the images that each group encodes."""
    return {
        name: [task.key for decision in log for task in decision.tasks]
        for name, log in cluster.encode_logs.items()
    }


def two_groups(policy: ImagePolicy, *, encode_items: int = 1) -> ModelCluster:
    limits = make_limits(encoders=2, encode_items=encode_items)
    return ModelCluster(limits, default_policies(dispatch=policy))


def test_dispatch_policy_names_the_group_and_sees_what_the_groups_do() -> None:
    Watched.views.clear()
    Watched.waiting.clear()
    cluster = two_groups(Watched())
    cluster.submit(image_request("r", (b"a", 8), (b"b", 12)))
    assert out(cluster) == {"encode-0": [b"b"], "encode-1": [b"a"]}
    first, second = Watched.views
    assert [group.free for group in first.groups] == [True, True]
    assert Watched.waiting == [[8, 12], [12]]
    group = second.groups[1]
    assert (group.free, group.items, group.tokens, group.largest) == (False, 1, 8, 8)
    assert_served(cluster, "r")


def test_dispatch_policy_is_not_called_if_there_is_one_answer() -> None:
    Watched.views.clear()
    Watched.waiting.clear()
    limits = make_limits(encode_items=1)
    cluster = ModelCluster(limits, default_policies(dispatch=Watched()))
    cluster.submit(image_request("one", (b"a", 8)))
    cluster.drain()
    assert not Watched.views
    cluster.submit(image_request("two", (b"b", 8), (b"c", 8), (b"d", 8)))
    cluster.drain()
    assert [len(waiting) for waiting in Watched.waiting] == [3, 2]
    assert_served(cluster, "one", "two")


def test_dispatch_policy_is_told_who_is_held_up_in_the_same_processes() -> None:
    Watched.views.clear()
    limits = make_limits(encoders=2, generators=2, encode_pauses=True)
    cluster = ModelCluster(limits, default_policies(dispatch=Watched()))
    cluster.submit(make_request("text", [1, 2, 3], max_tokens=8))
    cluster.run_generate()
    cluster.submit(image_request("image", (b"a", 8)))
    groups = Watched.views[-1].groups
    assert [group.held_up for group in groups] == [1, 0]
    assert groups[0].load_tokens >= 3
    cluster.drain()


def test_dispatch_of_some_images_leaves_the_others_in_place() -> None:
    """The front waits while one is encoded; afterwards it is the only image left."""
    cluster = two_groups(Behind())
    cluster.submit(image_request("r", (b"a", 8), (b"b", 8), (b"c", 8)))
    assert out(cluster) == {"encode-0": [b"b"], "encode-1": [b"c"]}
    cluster.run_encode("encode-0")
    assert out(cluster) == {"encode-0": [], "encode-1": [b"c"]}
    cluster.run_encode("encode-1")
    assert out(cluster) == {"encode-0": [b"a"], "encode-1": []}
    assert_served(cluster, "r")
