"""Decisions of the built-in memory policies, case by case and under random measurements."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.memory.views import attempted, rank_memory, requested, reserved
from vsched.policy import Attempt, Build, MemoryPolicy, Probe
from vsched_policies.memory import AutoProfile, Pinned

PLAIN = AutoProfile(mem_fraction=1.0, headroom_bytes=0)
"""Keeps nothing back, so that the sums are simple."""


def refused(answer: object) -> str:
    """Return the message of a failure, which must have value, limit and remedy."""
    assert isinstance(answer, str)
    assert all(word in answer for word in ("value ", "limit ", "Remedy: "))
    return answer


def in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)


AUTO, SOME = AutoProfile(), AutoProfile(mem_fraction=0.9, headroom_bytes=50_000)
PROBE = attempted("probe", 8192)
NEARLY_FULL = [rank_memory(available_bytes=50_000)]
GROWTH = [reserved(30_000), reserved(20_000, rank=1)]
HELD = [reserved(30_000, held=True), reserved(20_000, pool="another device")]


@pytest.mark.parametrize(
    ("policy", "attempts", "view", "answer"),
    [
        # The probe has `max(batch tokens + slots, 8192)` tokens, in whole blocks, whatever the context.
        (AUTO, [], {"batch_tokens": 2048, "slots": 64}, Probe(8192)),
        (AUTO, [], {"batch_tokens": 8192, "slots": 0}, Probe(8192)),
        (AUTO, [], {"batch_tokens": 8192, "slots": 1}, Probe(8208)),
        (AUTO, [], {"batch_tokens": 10_000, "slots": 100}, Probe(10_112)),
        (AUTO, [], {"context_tokens": 60_000}, Probe(8192)),
        # A probe larger than the free memory gets the free memory, minus the reservations of encoders.
        (AUTO, [], {"ranks": NEARLY_FULL}, Probe(4992)),
        (AUTO, [], {"ranks": NEARLY_FULL, "reservations": [reserved(20_000)]}, Probe(2992)),
        # The rest: 1,000,000 less 250,000 that is not KV, 100,000 of peers and the headroom, times the fraction.
        (PLAIN, [PROBE], {"context_tokens": 60_000}, Build(64_992)),
        (SOME, [PROBE], {}, Build(54_000, profile=True, headroom_bytes=50_000)),
        # Growth of encoders that is not held is kept free; held memory counts among the peers already.
        (PLAIN, [PROBE], {"reservations": GROWTH}, Build(60_000)),
        (PLAIN, [PROBE], {"reservations": HELD}, Build(64_992)),
        # Neither memory other than KV nor memory of peers is ever negative.
        (PLAIN, [attempted("probe", 8192, peak_bytes=10_000)], {}, Build(90_000)),
        (PLAIN, [attempted("probe", 8192, available_bytes=900_000)], {}, Build(74_992)),
        # The size that held is accepted.
        (PLAIN, [PROBE, attempted("build", 60_000)], {}, None),
        (Pinned(tokens=100), [], {}, Build(100)),
        (Pinned(bytes=1_009), [], {}, Build(100)),
        (Pinned(tokens=100, headroom_bytes=9), [], {}, Build(100, headroom_bytes=9)),
    ],
)
def test_memory_policies_request_probe_and_build(
    policy: MemoryPolicy, attempts: list[Attempt], view: dict[str, Any], answer: object
) -> None:
    assert requested(policy, *attempts, **view) == answer


def test_auto_profile_refuses_a_full_device() -> None:
    message = refused(requested(AutoProfile(), ranks=[rank_memory(available_bytes=159)]))
    assert "value 0 tokens, limit at least 16 tokens" in message


def test_auto_profile_ignores_the_context_until_it_knows_the_rest() -> None:
    """The probe need not hold a whole request, the build must."""
    policy = AutoProfile(headroom_bytes=100_000)
    message = refused(requested(policy, PROBE, context_tokens=60_000))
    assert "value 52240 tokens (510.2 KiB) next to headroom of 97.7 KiB" in message
    assert "limit at least 60000 tokens" in message
    assert in_order(
        message,
        "lower generate.context_tokens to 52240 or less",
        "raise generate.memory.mem_fraction (now 0.95",
        "lower generate.max_batch_tokens (now 2048)",
        "generate.slots (now 64)",
        "encode.admission.max_tokens",
    )


def test_auto_profile_probes_with_little_when_much_does_not_fit() -> None:
    """At most two probes, then the error names the settings."""
    first = attempted("probe", 8192, "out_of_memory")
    assert requested(AutoProfile(), first) == Probe(1024)
    second = attempted("probe", 1024, "out_of_memory")
    message = refused(requested(AutoProfile(), first, second))
    assert "a probe of 1024 tokens" in message
    assert "limit 976.6 KiB in all" in message
    assert in_order(message, "generate.max_batch_tokens", "generate.slots", "encode.admission")


def test_auto_profile_takes_the_minimum_over_ranks() -> None:
    """A size must fit on all ranks."""
    ranks = [
        rank_memory(rank=rank, pool=f"device {rank}", peak_bytes=peak, kv_bytes=80_000)
        for rank, peak in enumerate([300_000, 480_000, 310_000])
    ]
    probe = Attempt(action="probe", tokens=8000, outcome="fits", message="", ranks=ranks)
    assert requested(PLAIN, probe, ranks=ranks) == Build(50_000)


def test_auto_profile_counts_ranks_on_one_device_once() -> None:
    """Ranks that share a pool are no peers of each other, and all their caches grow."""
    ranks = [
        rank_memory(
            rank=rank,
            available_bytes=300_000,
            reserved_bytes=300_000,
            peak_bytes=330_000,
            kv_bytes=80_000,
        )
        for rank in range(2)
    ]
    probe = Attempt(action="probe", tokens=8000, outcome="fits", message="", ranks=ranks)
    # 1,000,000 less twice 250,000 that is not KV and 100,000 of others, at 20 bytes a token.
    assert requested(PLAIN, probe, ranks=ranks) == Build(20_000)


def test_auto_profile_shrinks_by_a_share() -> None:
    """5 % less each time, 4 attempts in all."""
    attempts = [attempted("probe", 8192)]
    sizes = []
    for _ in range(4):
        answer = requested(PLAIN, *attempts)
        assert isinstance(answer, Build)
        sizes.append(answer.tokens)
        attempts.append(attempted("build", answer.tokens, "out_of_memory"))
    assert sizes == [64_992, 61_728, 58_640, 55_696]
    refused(requested(PLAIN, *attempts))


def test_auto_profile_reports_all_when_it_gives_up() -> None:
    builds = [attempted("build", tokens, "out_of_memory") for tokens in (4096, 3888, 3680, 3488)]
    policy = AutoProfile(headroom_bytes=1024, mem_fraction=0.9)
    message = refused(requested(policy, attempted("probe", 8192), *builds))
    assert "in every one of 4 attempts (rank 0: out_of_memory)" in message
    assert "value initial 4096 tokens (40.0 KiB), final 3488 tokens (34.1 KiB)" in message
    assert (
        "peak 284.1 KiB, headroom 1.0 KiB, limit total 976.6 KiB, other processes 97.7" in message
    )
    assert in_order(
        message,
        "lower generate.memory.mem_fraction (now 0.9)",
        "lower generate.max_batch_tokens",
        "generate.slots",
        "encode.admission.max_tokens",
        "free the device",
    )


def test_pinned_refuses_sizes_that_did_not_hold() -> None:
    """The operator's size is not reduced silently."""
    message = refused(requested(Pinned(bytes=640), attempted("build", 64, "out_of_memory")))
    assert "value 64 tokens (640 bytes), peak 244.8 KiB, headroom 0 bytes" in message
    assert in_order(message, "lower generate.memory.bytes", "generate.max_batch_tokens")


@pytest.mark.parametrize(("fraction", "tokens_max"), [(1.0, 70_000), (0.5, 35_000), (0.95, 66_500)])
def test_pinned_fits_its_fraction_of_the_free_memory(fraction: float, tokens_max: int) -> None:
    """`mem_fraction` multiplies the budget: 1,000,000 bytes less 200,000 of our own and 100,000 of others."""
    assert requested(Pinned(tokens=tokens_max, mem_fraction=fraction)) == Build(tokens_max)
    message = refused(requested(Pinned(tokens=tokens_max + 1, mem_fraction=fraction)))
    assert "raise generate.memory_limit where that is the limit" in message
    assert f"value {tokens_max + 1} tokens x 10 bytes" in message
    assert f"limit {tokens_max * 10} bytes ({tokens_max} tokens)" in message
    assert f"Remedy: lower generate.memory.tokens to {tokens_max} or less" in message


def test_pinned_refuses_less_than_one_block() -> None:
    message = refused(requested(Pinned(tokens=15)))
    assert "value 15 tokens, limit at least 16 tokens." in message
    assert "Remedy: raise generate.memory.tokens to 16 or more" in message


def test_every_policy_leaves_room_for_states() -> None:
    """50,000 bytes for all slots of a rank; two ranks on a device need them twice."""
    tight = [rank_memory(available_bytes=100_000)]
    assert requested(AutoProfile(), ranks=tight, state_bytes=50_000) == Probe(4992)
    both = [rank_memory(available_bytes=200_000), rank_memory(rank=1, available_bytes=200_000)]
    assert requested(AutoProfile(), ranks=both, state_bytes=50_000) == Probe(4992)
    pinned = Pinned(tokens=65_001, mem_fraction=1.0)
    assert "65000 tokens" in refused(requested(pinned, state_bytes=50_000))
    pinned = Pinned(tokens=65_000, mem_fraction=1.0)
    assert requested(pinned, state_bytes=50_000) == Build(65_000)
    measured = attempted("probe", 8192, peak_bytes=350_000 + 81_920, state_bytes=100_000)
    policy = AutoProfile(headroom_bytes=0, mem_fraction=1.0)
    assert requested(policy, attempted("probe", 8192)) == Build(65_000 // 16 * 16, True, 0)
    assert requested(policy, measured) == Build(55_000 // 16 * 16, True, 0)
