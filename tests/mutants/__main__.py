"""`python -m tests.mutants`: mutate what handles loss, put-front, claims and digests; say which mutants survive.

Each mutant meets random runs of the kernel, scenarios of the swarm, and the unit tests of its place, until one notices.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType

import pytest

from tests.mutants.mutate import Mutant, alive, mutants_of
from tests.mutants.places import PLACES
from tests.unit.kernel.policy_pool import random_policies
from vsched.sim.cluster.scenario import FIRST_PRESSED, draw_scenario
from vsched.sim.cluster.swarm import run_guarded
from vsched.testing import run_random

RUNS = 60
SCENARIOS = 10
PATIENCE_S = 120
"""Without an answer for so long, a mutant hangs, which is noticed, too."""


def run_kernel() -> bool:
    """Return whether random runs of the kernel notice something."""
    for seed in range(RUNS):
        rng = random.Random(seed)
        try:
            run_random(rng, random_policies(rng))
        except Exception:  # noqa: BLE001 - whatever it is, it was noticed
            return True
    return False


def run_swarm() -> bool:
    """Return whether scenarios of the swarm notice something."""
    seeds = range(FIRST_PRESSED + 1, FIRST_PRESSED + 1 + 2 * SCENARIOS, 2)
    return any(run_guarded(draw_scenario(seed)).violations for seed in seeds)


def run_tests(paths: tuple[str, ...]) -> bool:
    """Return whether unit tests notice something."""
    options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "not slow"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = pytest.main([*options, *paths])
    assert status in (0, 1), f"pytest could not run {paths}: status {status}"
    return status == 1


def noticed(mutant: Mutant) -> str:
    """Return what notices a mutant; empty where nothing does."""
    kernel = mutant.place.startswith("vsched.kernel")
    looks: dict[str, Callable[[], bool]] = {}
    if kernel:
        looks["random runs"] = run_kernel
    looks["unit tests"] = lambda: run_tests(PLACES[mutant.place])
    if not mutant.place.startswith("vsched.api"):
        looks["swarm"] = run_swarm
    with alive(mutant):
        for name, look in looks.items():
            signal.alarm(PATIENCE_S)
            try:
                if look():
                    return name
            except TimeoutError:
                return f"{name}, without an end"
            finally:
                signal.alarm(0)
    return ""


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError


def main(words: list[str]) -> int:
    """Mutate the places whose name contains one of `words`, or all."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _give_up)
    chosen = [place for place in PLACES if not words or any(word in place for word in words)]
    count, survivors = 0, []
    for place in chosen:
        for mutant in mutants_of(place):
            count += 1
            by = noticed(mutant)
            if not by:
                survivors.append(mutant)
                print(f"survives: {mutant}", flush=True)
        print(f"{place}: done, {count} mutants so far", flush=True)
    print(f"{count} mutants, {len(survivors)} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
