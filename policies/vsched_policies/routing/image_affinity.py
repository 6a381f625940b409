"""Back to the replica that knows the prompt or its images, unless it has too much to do."""

from __future__ import annotations

from hashlib import blake2b

from vsched.policy import Fraction, RoutingPolicy, RoutingView
from vsched_policies.routing.least_loaded import candidates, least_loaded


class ImageAffinity(RoutingPolicy, frozen=True, kw_only=True):
    """Sends requests to the healthy replica that knows most of the prompt, within a bound on load.

    A replica that is busier than the least loaded one by more than the bound is left out, however much it knows: a
    popular image must not pull everyone to one replica. Of the others, the one with the largest share of the prompt in
    its KV cache is taken; where a request's images were last sent counts half as much, because that promises a prefix
    and does not prove one. Equals are told apart by a rendezvous hash of the first image, so that equal images that
    nobody knows yet meet, and stay where they are when another replica comes or goes; without images, by their load.

    Attributes:
        imbalance: How much busier than the least loaded replica one may be, as a share of what a replica can run at
            once.
    """

    imbalance: Fraction = 0.03

    def choose(self, view: RoutingView) -> int:
        """Return the replica that knows most, of those within the bound."""
        healthy = candidates(view)
        least = min(view.replicas[index].load_tokens for index in healthy)
        limit = least + self.imbalance * view.load_limit_tokens
        within = [index for index in healthy if view.replicas[index].load_tokens <= limit]
        most = max(_known(view, index) for index in within)
        equals = [index for index in within if _known(view, index) == most]
        if not view.item_keys:
            return least_loaded(view, equals)
        return max(equals, key=lambda index: _weight(view.item_keys[0], view.replicas[index].index))


def _known(view: RoutingView, index: int) -> int:
    """Return the share of the prompt in the KV cache, plus half the share of the images, times twice both sizes."""
    replica = view.replicas[index]
    images = max(len(view.item_keys), 1)
    return 2 * replica.prefix_tokens * images + replica.items_seen * view.prompt_tokens


def _weight(key: bytes, replica: int) -> bytes:
    """Return what decides between replicas for an image; a replica's weight depends on no other replica."""
    return blake2b(key, digest_size=8, salt=replica.to_bytes(8, "little")).digest()
