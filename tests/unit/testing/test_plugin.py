"""The pytest plug-in, run on test files of its own."""

from __future__ import annotations

import asyncio
import contextlib
import tomllib
from pathlib import Path

import numpy as np  # noqa: F401 - pytester forgets what its runs import, and numpy is imported once a process
import pytest

from tests.programs import printed_by

pytest_plugins = "pytester"
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SETTINGS = """
[pytest]
asyncio_default_fixture_loop_scope = function
addopts = --strict-markers -p no:cacheprovider
filterwarnings = error
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder whose tests use the plug-in, in pytest-asyncio's strict mode."""
    pytester.makeini(SETTINGS)
    return pytester


def run(project: pytest.Pytester, source: str, *words: str) -> pytest.RunResult:
    project.makepyfile(test_it=f"import asyncio\nimport pytest\n\n{source}")
    return project.runpytest_inprocess(*words)


def test_plugin_imports_neither_the_engine_nor_slow_libraries() -> None:
    """It is loaded by its entry point into every run of pytest, before coverage is measured."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"vsched": "vsched.testing.plugin"}
    code = (
        "import sys, pytest; before = set(sys.modules); import vsched.testing.plugin; "
        "print(*sorted(set(sys.modules) - before))"
    )
    assert printed_by(code).split() == ["vsched", "vsched.testing", "vsched.testing.plugin"]


def test_plugin_runs_a_test_once_for_each_seed(project: pytest.Pytester) -> None:
    source = """
@pytest.mark.sim(seeds=[3, 5])
async def test_seeds(sim):
    await asyncio.sleep(3600)
    assert asyncio.get_running_loop() is sim.loop
    assert sim.loop.time() == 3600

@pytest.mark.sim(seeds=2)
@pytest.mark.parametrize("letter", "ab")
async def test_crossed(sim, letter): ...

@pytest.mark.sim
async def test_single(sim):
    assert sim.seed == 0
"""
    result = run(project, source, "-v")
    result.assert_outcomes(passed=7)
    expected = ["*test_seeds?seed3*", "*test_seeds?seed5*", "*test_crossed?*", "*test_single *"]
    result.stdout.fnmatch_lines(expected)


def test_plugin_leaves_other_tests_alone(project: pytest.Pytester) -> None:
    """Without any other loop factory, and with one in a conftest."""
    source = """
@pytest.mark.asyncio
async def test_plain(request):
    assert type(asyncio.get_running_loop()).__name__ == "{kind}"
    assert request.node.name == "test_plain"

@pytest.mark.sim
async def test_marked():
    assert type(asyncio.get_running_loop()).__name__ == "VirtualLoop"

def test_sync(): ...
"""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        usual = type(loop).__name__
    run(project, source.replace("{kind}", usual)).assert_outcomes(passed=3)
    project.makeconftest("""
import asyncio
class OwnLoop(asyncio.SelectorEventLoop): ...
def pytest_asyncio_loop_factories(config, item):
    return {"own": OwnLoop}
""")
    run(project, source.replace("{kind}", "OwnLoop")).assert_outcomes(passed=3)


FAILING = """
@pytest.mark.sim(seeds=range(10))
async def test_plan(sim):
    plan = sim.draw_faults(["generate-0"], 10**9)
    await asyncio.sleep(1.5)
    assert sim.seed != 7
"""


def test_plugin_prints_the_command_that_repeats_a_failure(project: pytest.Pytester) -> None:
    """The printed command does; other seeds and another plan can be given."""
    result = run(project, FAILING)
    result.assert_outcomes(passed=9, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*- simulation -*",
            "seed: 7",
            "virtual time: 1.500000000 s",
            'faults: {"seed": *, "faults": [[]',
            '  {"kind":"*',
            "]}",
            "replay: pytest 'test_it.py::test_plan[[]seed7[]]'",
        ]
    )
    result = project.runpytest_inprocess("test_it.py::test_plan[seed7]")
    result.assert_outcomes(failed=1)
    (project.path / "plan.json").write_text('{"seed": 9, "faults": [{"kind": "decode_error"}]}')
    words = ["--sim-seed=76", "--sim-seed=77", "--sim-plan=plan.json"]
    result = run(project, FAILING.replace("!= 7", "!= 77"), *words)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            'faults: {"seed": 9, "faults": [[]',
            '  {"kind":"decode_error","at_ns":0}',
            "]}",
            "replay: pytest 'test_it.py::test_plan[[]seed77[]]' --sim-seed=77 --sim-plan=plan.json",
        ]
    )


def test_plugin_fails_a_test_whose_loop_has_seen_an_error(project: pytest.Pytester) -> None:
    """Exceptions in callbacks are only logged by asyncio."""
    source = """
@pytest.mark.sim
async def test_callback():
    asyncio.get_running_loop().call_later(1, lambda: 1 / 0)
    await asyncio.sleep(2)

@pytest.mark.sim
async def test_hang():
    await asyncio.Event().wait()
"""
    result = run(project, source)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*ZeroDivisionError*", "*on the virtual loop: Exception in callback*", "*VirtualDeadlock*"]
    )


def test_plugin_refuses_markers_that_are_wrong(project: pytest.Pytester) -> None:
    markers = ["sim(3)", "sim(sees=3)", "sim(seeds=[])", "sim(seeds=0)", "sim(seeds=['a'])"]
    files = {
        f"test_{index}": f"import pytest\n@pytest.mark.{marker}\nasync def test_it(): ..."
        for index, marker in enumerate(markers)
    }
    project.makepyfile(
        **files,
        test_fixture="def test_it(sim): ...",
        test_sync="import pytest\n@pytest.mark.sim\ndef test_it(): ...",
    )
    result = project.runpytest_inprocess("--continue-on-collection-errors")
    result.assert_outcomes(errors=7)
    by_name = "sim takes nothing but seeds=..., by its name"
    listed = "seeds is how many there are, or a sequence of whole numbers"
    complaints = [by_name, by_name, listed, listed, listed]
    lines = [f"*test_{index}.py::test_it: {one}*" for index, one in enumerate(complaints)]
    fixture = "*the fixture sim is for tests marked with pytest.mark.sim*"
    result.stdout.fnmatch_lines([*lines, "*test_it: sim needs an async function*", fixture])


def test_plugin_names_the_version_of_pytest_asyncio_that_it_needs(project: pytest.Pytester) -> None:
    project.makeini("[pytest]")  # the setting of pytest-asyncio is unknown without it
    project.makeconftest(
        'def pytest_configure(config): config.pluginmanager.register(object(), "asyncio")'
    )
    project.makepyfile("import pytest\n@pytest.mark.sim\nasync def test_it(): ...")
    result = project.runpytest_inprocess("-p", "no:asyncio")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_it: sim needs pytest-asyncio 1.5 or newer*"])


def test_plugin_draws_faults_of_the_hosts_that_a_file_configures(project: pytest.Pytester) -> None:
    source = """
from vsched.config.sections import ClusterConfig
from vsched.sim import HostCrash, HostCut, HostStall, SlowHostLink, WorkerCrash, small_config

SEEN = set()

@pytest.fixture
def sim_config():
    hosts = {"far": "tcp://10.0.0.2:7700"}
    return small_config(cluster=ClusterConfig(hosts=hosts, key_file="any", encode=["far"]))

@pytest.mark.sim(seeds=60)
async def test_faults_are_drawn(faults):
    SEEN.update(type(fault) for fault in faults.faults)
    assert {getattr(fault, "host", "far") for fault in faults.faults} <= {"far"}

@pytest.mark.sim
async def test_engine_has_the_hosts(sim_engine):
    async with sim_engine() as engine:
        assert set(engine.config.cluster.hosts) == {"far"}

def test_all_kinds_were_there():
    assert {HostCrash, HostCut, HostStall, SlowHostLink, WorkerCrash} <= SEEN
"""
    run(project, source).assert_outcomes(passed=62)


FAILING_POLICY = """
from vsched.policy import RequestPolicy
from vsched.sim import small_config

class Broken(RequestPolicy, frozen=True, kw_only=True):
    def admit(self, view):
        return 1 // 0

@pytest.fixture
def sim_config():
    import msgspec
    config = small_config()
    generate = msgspec.structs.replace(config.generate, admission={"use": "test_it:Broken"})
    return msgspec.structs.replace(config, generate=generate)

@pytest.mark.sim
async def test_tried(sim_engine, workload):
    async with sim_engine() as engine:
        await engine.run(workload)
        await engine.heal()

@pytest.mark.sim
async def test_allowed(sim_engine, workload):
    async with sim_engine(allow_policy_failures=True) as engine:
        await engine.run(workload)
        await engine.heal()
"""


def test_plugin_fails_a_test_in_which_a_policy_failed(project: pytest.Pytester) -> None:
    """Unless the test is about that: the default has decided in its place, so the policy was not tested."""
    project.syspathinsert()
    result = run(project, FAILING_POLICY)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*SimulationFailed: at *: policy Broken failed:", '*File "*test_it.py", line *, in admit']
    )


def test_plugin_lets_hypothesis_draw_fault_plans(project: pytest.Pytester) -> None:
    """Faults of each engine of a test are timed from its own start."""
    source = """
from hypothesis import HealthCheck, given, settings
from vsched.sim import FaultPlan, OutOfMemory
from vsched.testing import fault_plans

once = settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

@pytest.mark.sim
@once
@given(plan=fault_plans(["encode"], 10**9, kinds=[OutOfMemory]))
async def test_drawn(sim_engine, workload, plan):
    async with sim_engine(faults=plan) as engine:
        await engine.run(workload[:2])
        await engine.heal()

@pytest.mark.sim
async def test_two_engines(sim_engine):
    plan = FaultPlan(faults=(OutOfMemory(at_ns=0, group="encode", during="load"),))
    for _ in range(2):
        async with sim_engine(faults=plan) as engine:
            assert engine.engine.state == "ready"
            assert engine.world.origin_ns == asyncio.get_running_loop().now_ns()
"""
    run(project, source).assert_outcomes(passed=2)
