"""The same seed is the same run, in any process."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.programs import printed_by
from tests.unit.sim.shapes import COST, SCARCE, config, scarce
from vsched.sim.cluster import draw_scenario, run_scenario
from vsched.sim.fast.groups import GroupOutage
from vsched.sim.fast.simulation import simulate

SCENARIOS = 4


def print_digests() -> None:
    """Print the digests of scenarios and of a fast simulation in which a group is lost, and a hash of a string."""
    logging.disable(logging.CRITICAL)
    lost = GroupOutage(group="generate-0", at_ns=30_000_000, duration_ns=20_000_000)
    settings = config(*SCARCE, "generate.replicas=2", "encode.encoding.look_ahead_chunks=100")
    print(simulate(settings, scarce(4), cost=COST, outages=[lost]).digest)
    for seed in range(SCENARIOS):
        print(run_scenario(draw_scenario(seed)).digest)
    print(hash("a string"))


def digests(hash_seed: str) -> list[str]:
    code = f"from {__name__} import print_digests; print_digests()"
    return printed_by(code, PYTHONHASHSEED=hash_seed).split()


@pytest.mark.slow
def test_run_is_the_same_under_any_hash_seed() -> None:
    """Of the fast simulation, and of all events of engines with their times: loop, threads, network."""
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(digests, ("1", "2"))
    assert first[-1] != second[-1], "the processes do hash differently"
    assert first[:-1] == second[:-1]
    assert len(set(first[:-1])) == len(first) - 1
