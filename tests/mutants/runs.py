"""Checks of mutants in addition to unit tests: random runs of the kernel, and scenarios of the swarm.

Its name excludes it from the test suite, which has longer ones of the same.
"""

from __future__ import annotations

import logging
import random

import pytest

from tests.unit.kernel.policy_pool import random_policies
from vsched.sim.cluster.scenario import FIRST_PRESSED, draw_scenario
from vsched.sim.cluster.swarm import run_guarded
from vsched.testing import run_random

RUNS = 100
SCENARIOS = 10


@pytest.mark.parametrize("seed", range(RUNS))
def test_random_run(seed: int) -> None:
    rng = random.Random(seed)
    run_random(rng, random_policies(rng))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(FIRST_PRESSED, FIRST_PRESSED + SCENARIOS))
def test_scenario(seed: int) -> None:
    logging.disable(logging.CRITICAL)
    try:
        assert not run_guarded(draw_scenario(seed)).violations
    finally:
        logging.disable(logging.NOTSET)
