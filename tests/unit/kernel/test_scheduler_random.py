"""Random schedules, faults and cancellations over model ranks: nothing is lost, wrong or stuck."""

from __future__ import annotations

import random

import pytest

from tests.unit.kernel.model_ranks import Cluster, random_request
from vsched.kernel import Sizes
from vsched.types import FinishReason


def random_sizes(rng: random.Random) -> Sizes:
    slots = rng.randint(1, 6)
    return Sizes(
        block_size=rng.choice([1, 2, 4, 16]),
        blocks=rng.randint(12, 120),
        slots=slots,
        batch_tokens=slots + rng.randint(1, 60),
        chunk_tokens=rng.randint(1, 40),
        context_tokens=rng.randint(40, 400),
        page_rows=rng.choice([1, 4, 8]),
        pages=rng.randint(4, 40),
        encode_items=rng.randint(1, 4),
        waiting=rng.randint(5, 50),
        prefix_cache=rng.random() < 0.7,
        generate_depth=rng.choice([1, 2, 2, 3]),
    )


def run_random(seed: int, *, events: int = 120, losses: bool = True) -> Cluster:
    rng = random.Random(seed)
    cluster = Cluster(random_sizes(rng))
    for index in range(events):
        choice = rng.random()
        if choice < 0.25:
            request = random_request(rng, f"r{index}", image_tokens_max=30, length_max=60)
            cluster.submit(request)
        elif choice < 0.30 and cluster.requests:
            cluster.abort(
                rng.choice(sorted(cluster.requests)),
                rng.choice([FinishReason.ABORT, FinishReason.STOP]),
            )
        elif choice < 0.32 and losses:
            group = rng.choice(["encode", "generate"])
            if group not in cluster.down:
                cluster.lose(group)
        elif choice < 0.34 and cluster.encode_log:
            cluster.run_encode(fail="the test says so")
        elif choice < 0.55 and cluster.encode_log:
            cluster.run_encode()
        elif cluster.generate_log:
            cluster.run_generate()
        if cluster.down and rng.random() < 0.3:
            cluster.restore(sorted(cluster.down)[0])
    for group in sorted(cluster.down):
        cluster.restore(group)
    cluster.drain()
    return cluster


@pytest.mark.parametrize("seed", range(150))
def test_scheduler_serves_or_refuses_everything(seed: int) -> None:
    """F4, F5, E18, A9: one terminal reply for all, right outputs, and a drained kernel holds nothing."""
    cluster = run_random(seed)
    kernel = cluster.kernel
    for name, request in cluster.requests.items():
        assert (name in cluster.ended) != (name in cluster.refused)
        finish = cluster.ended.get(name)
        expected = cluster.expected_outputs(request)
        if finish is not None and finish.reason is FinishReason.LENGTH:
            assert cluster.outputs[name] == expected
        elif finish is not None:
            assert cluster.outputs[name] == expected[: len(cluster.outputs[name])]
    assert kernel.generate.pool.held == 0
    assert len(kernel.generate.running) == 0
    assert kernel.encode.waiting == 0
    assert all(not entry.users and not entry.readers for entry in kernel.encode)
