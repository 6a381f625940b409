"""Marks in production code for simulations: probes, which report coincidences, and points for the injection of faults.

Probes are rare coincidences, marked in the code, so that a simulation can report which ones it reached.

A passing test proves nothing about a coincidence that did not occur in it. So each one is declared here and marked in
the code, like FoundationDB's `CODE_PROBE`. The swarm counts them, and its test fails if one is never reached.

A probe has no effect on the program. Outside of tests and simulations, a probe or a fault point costs one function call
and one global lookup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

PROBES: Mapping[str, str] = MappingProxyType(
    {
        "kernel.second_group_lost": "a group is lost while another of its stage is down",
        "kernel.lost_while_draining": "a group is lost while it drains",
        "kernel.restarted_while_running": "an operator restarts a group that still runs requests",
        "kernel.drain_during_recovery": "a group drains while another of its stage is down",
        "kernel.clear_during_recovery": "all requests are cleared while a group is down",
        "kernel.suspect_aborted": "a suspected poison request is aborted",
        "kernel.poison_ended": "a request is failed because it caused the loss of its group",
        "kernel.put_front_at_loss": "a request of a lost group is queued before one that is already waiting",
        "kernel.retired_with_requests": "requests of a retired group are moved",
        "kernel.finished_after_abort": "a step ends a request that was aborted while it was in flight",
        "kernel.settled_at_its_end": "the last step of a preempted request ends it",
        "kernel.stall_unblocked": "nothing makes progress, and the front of the queue is unblocked",
        "moves.requeued_from_closed_group": "a preempted request is requeued while its group accepts no requests",
        "moves.moved": "a waiting request moves from a closed group to an open one",
        "moves.suspended": "a waiting request is suspended until a group is up again",
        "moves.kept_by_draining_group": "a draining group keeps a waiting request that ran during a loss",
        "moves.expired": "a request has waited too long for its first step",
        "generate.lost_while_settling": "a group is lost while a preempted request's last step is in flight",
        "generate.lost_while_reading": "a group is lost while a step reads embeddings",
        "generate.lost_in_quarantine": "a group is lost while a suspect runs",
        "generate.suspect_cleared": "a suspect has passed the step at which its group was lost",
        "generate.suspect_waits": "a suspect waits because another runs",
        "generate.settling_ended": "a preempted request ends while its last step is in flight",
        "generate.reader_ended": "a request ends before the step that reads embeddings for it completes",
        "generate.preempted_before_growth": "a request is preempted in the step in which it needs a block",
        "generate.growth_taken_back": "a request is preempted in the step in which it gets a block",
        "generate.preempted_itself": "the request that needs a block is itself preempted",
        "generate.no_room_to_swap": "blocks to swap out do not fit into host memory",
        "generate.swap_ended": "a request ends while it is swapped out",
        "generate.lost_while_swapped": "a group is lost while some of its requests are swapped out",
        "generate.embedding_gone": "an embedding is evicted while the request that needs it waits for a slot",
        "generate.stalled_prefill_preempted": "a stalled prefill is preempted for an older request",
        "generate.atom_waits": "an unsplittable chunk waits for a step with room for it",
        "generate.chunk_holds_atom": "a chunk ends before, or contains the whole of, a bidirectional span",
        "generate.chunk_cut_to_block": "a chunk is cut back to a block boundary before a missing embedding",
        "embeddings.moved_up": "an older request claims an image that is already queued for an encoder",
        "embeddings.claimed_twice": "a request drops one of two claims on the same content",
        "embeddings.unclaimed_while_encoding": "the last claim on an image is dropped while it is encoded",
        "embeddings.stale_result": "an embedding without claims is discarded",
        "embeddings.stale_claimed_again": "a stale embedding that was claimed again is discarded and encoded again",
        "embeddings.claimed_preempted": "an embedding that a request claims is evicted for an older request",
        "embeddings.no_room": "an image gets no pages, even with all permitted evictions",
        "encode.front_has_room": "the policy's choice gets no pages, but the front of the queue does",
        "encode.batch_halved": "a batch fails and is tried again in halves",
        "encode.lost_unclaimed": "an encode group is lost while it encodes an unclaimed image",
        "encode.item_failed": "an image is given up",
        "encode.orphaned_freed": "pages that lost ranks could still write to are freed",
        "log.gap": "a rank receives an entry that is not the next one",
        "log.digest_differs": "a rank receives an entry whose digest differs from its own",
        "leader.votes_differ": "ranks of a group vote differently on a KV cache",
        "shell.event_waits": "an event arises while the commands of another are carried out",
        "shell.result_after_loss": "a result of a lost group arrives",
        "shell.clear_during_sizing": "all requests are cleared while a lost group's KV cache is sized",
        "administration.drain_deadline": "a group is restarted before it is drained",
        "administration.drain_outlives_loss": "a group that was lost while draining drains again",
        "administration.resumed_while_draining": "a group is resumed before it is drained",
        "administration.lost_while_restarting": "a group is lost while a restart drains it",
        "worker_group.start_failed": "a lost worker group fails to start",
        "worker_group.given_up": "a lost worker group is given up",
        "adapters.lost_while_adding": "a group is lost while its ranks add or remove an adapter",
        "adapters.restored": "a lost group gets an adapter again",
        "rank.engine_silent": "a rank stops because it receives nothing from the engine",
    }
)
"""Probes by name: the package or class that has the probe, a dot, and the coincidence."""

_on_probe: Callable[[str], None] | None = None


def probe(name: str) -> None:
    """Report that a coincidence of `PROBES` was reached."""
    if _on_probe is not None:
        _on_probe(name)


@contextmanager
def observed() -> Iterator[Counter[str]]:
    """Count the probes that this process reaches in the context; contexts nest, and only the innermost one counts."""
    global _on_probe
    reached: Counter[str] = Counter()

    def note(name: str) -> None:
        assert name in PROBES, f"the probe {name!r} is not declared"
        reached[name] += 1

    before, _on_probe = _on_probe, note
    try:
        yield reached
    finally:
        _on_probe = before


OnPoint = Callable[[str, str], None]
"""Called with the name of a point and its subject; its exceptions propagate from the point."""

_on_point: OnPoint | None = None


def fault_point(name: str, subject: str = "") -> None:
    """Mark a point at which a fault can be injected.

    Pass only existing strings: formatting a name would cost more than the call.

    Args:
        name: Name of the point: package and next operation, as in `media.decode`.
        subject: Object of the operation, such as a group.
    """
    if _on_point is not None:
        _on_point(name, subject)


@contextmanager
def armed(on_point: OnPoint) -> Iterator[None]:
    """Let all fault points of this process call `on_point`; contexts nest, and the innermost one applies."""
    global _on_point
    before, _on_point = _on_point, on_point
    try:
        yield
    finally:
        _on_point = before
