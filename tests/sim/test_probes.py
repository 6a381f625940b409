"""Probes: the swarm reaches every declared coincidence, and the code marks each in one place."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from pathlib import Path

import pytest

import vsched
from vsched.kernel.generate import group
from vsched.probes import PROBES, observed
from vsched.sim.cluster.scenario import FIRST_PRESSED, draw_scenario, run_scenario, swarm

REACHING = (
    *(19, 37, 289, 1005, 1008, 1023, 1047, 1061, 1089),
    *(1095, 1101, 1126, 1151, 1154, 1159, 1189, 1216, 1313),
)
"""Seeds that reach every probe together; after changes of decisions, others may be necessary."""
SEEDS_MAX = 600


def test_each_probe_is_declared_and_stands_in_one_place() -> None:
    names: Counter[str] = Counter()
    for path in Path(vsched.__path__[0]).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "probe(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "probe":
                names.update(
                    one.value
                    for one in ast.walk(node.args[0])
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                )
    assert names == Counter(PROBES.keys())


def test_probes_change_no_decision() -> None:
    scenario = draw_scenario(FIRST_PRESSED + 1)
    with observed() as reached:
        seen = run_scenario(scenario)
    assert reached
    assert run_scenario(scenario).digest == seen.digest


def test_probe_whose_place_is_not_reached_any_more_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A probe that is declared and marked still counts as missing until a scenario reaches it."""
    seed = FIRST_PRESSED + 3
    reached = {name for name, count in swarm(1, seed=seed).probes.items() if count}
    passed = {name for name in reached if f'probe("{name}")' in inspect.getsource(group)}
    assert passed
    monkeypatch.setattr(group, "probe", lambda name: None)
    assert passed <= set(swarm(1, seed=seed).unreached)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_swarm_reaches_every_probe() -> None:
    """No other test covers a coincidence that no scenario reaches."""
    missing = set(PROBES)
    for seed in (*REACHING, *range(FIRST_PRESSED, FIRST_PRESSED + SEEDS_MAX)):
        if not missing:
            break
        outcome = swarm(1, seed=seed)
        assert not outcome.failures, outcome.failures[0].describe()
        missing &= set(outcome.unreached)
    assert not missing, "no scenario reaches this"
