"""The pytest plug-in: `@pytest.mark.sim(seeds=...)` runs a test on a virtual clock, once for each seed.

The report of a failed test contains everything needed to reproduce it: seed, fault plan and command.

Every pytest run in an environment with vsched imports this module. So it imports only pytest and
modules that pytest has already imported; everything else is imported when a test uses a fixture or
the marker.
"""

from __future__ import annotations

import inspect
import os
import random
import shlex
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import asyncio

    from vsched.config import Config
    from vsched.sim.cluster import SimEngine
    from vsched.sim.faults import FaultPlan
    from vsched.sim.loop import VirtualLoop
    from vsched.sim.workload.requests import Arrival

    LoopFactories = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]

_MARKER = (
    "sim(seeds=...): run the test on a virtual clock, once per seed with `seeds` (a number or a list), in which "
    "case callbacks due at the same moment run in an order drawn from the seed"
)


class SeededLoops:
    """Creates the event loops of one test with one seed, and records their failures."""

    def __init__(self, seed: int, *, permute: bool) -> None:
        self.seed = seed
        self._permute = permute
        self.forget()

    def forget(self) -> None:
        """Reset the records: the next test may use the same seed."""
        self.plan: FaultPlan | None = None
        self.failures: list[dict[str, Any]] = []
        self._loop: Callable[[], VirtualLoop | None] = lambda: None

    def __call__(self) -> VirtualLoop:
        """Create a loop."""
        from vsched.sim.loop import VirtualLoop

        loop = VirtualLoop(self.seed if self._permute else None)
        loop.set_exception_handler(self._take_failure)
        self._loop = weakref.ref(loop)
        return loop

    @property
    def loop(self) -> VirtualLoop | None:
        """The most recent loop, while it exists."""
        return self._loop()

    def _take_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(context)
        loop.default_exception_handler(context)


class SimCase:
    """Fixture object of a test on a virtual clock.

    Attributes:
        seed: The seed of this run of the test.
        rng: A generator seeded with it.
    """

    def __init__(self, loops: SeededLoops, plan_path: str | None) -> None:
        self.seed = loops.seed
        self.rng = random.Random(loops.seed)  # noqa: S311
        self._loops = loops
        self._plan_path = plan_path

    @property
    def loop(self) -> VirtualLoop:
        """The loop of an asynchronous test."""
        loop = self._loops.loop
        assert loop is not None, "the loop of a test exists while it runs"
        return loop

    def draw_faults(
        self,
        groups: Sequence[str],
        span_ns: int,
        *,
        ranks: int = 1,
        hosts: Sequence[str] = (),
    ) -> FaultPlan:
        """Return a plan drawn from the seed, or the one given with `--sim-plan`; failure reports show it."""
        from vsched.sim.faults import random_plan

        generator = random.Random(f"faults {self.seed}")  # noqa: S311
        plan = random_plan(generator, groups, span_ns, ranks=ranks, hosts=hosts)
        return self.faults_or(plan)

    def faults_or(self, plan: FaultPlan) -> FaultPlan:
        """Return this plan, or the one given with `--sim-plan`; failure reports show it."""
        from vsched.sim.faults import FaultPlan

        return self.adopt(FaultPlan.load(self._plan_path) if self._plan_path else plan)

    def adopt(self, plan: FaultPlan) -> FaultPlan:
        """Return the plan, and show it in failure reports."""
        self._loops.plan = plan
        return plan


# --- collecting ---


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for other seeds and for a plan to replay."""
    group = parser.getgroup("vsched", "simulation")
    group.addoption(
        "--sim-seed",
        action="append",
        type=int,
        metavar="N",
        help="run tests marked sim with this seed instead of their own; may be repeated",
    )
    group.addoption(
        "--sim-plan",
        metavar="FILE",
        help="give tests marked sim this fault plan (JSON) instead of a drawn one",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> None:
    """Make `sim` imply `asyncio`, so that it is sufficient in pytest-asyncio's strict mode."""
    if not inspect.isroutine(obj) or not collector.funcnamefilter(name):
        return
    marks = [*getattr(obj, "pytestmark", ()), *collector.iter_markers()]
    names = [mark.name for mark in marks]
    if "sim" in names:
        inner = getattr(getattr(obj, "hypothesis", None), "inner_test", obj)
        if not inspect.iscoroutinefunction(inner):
            raise pytest.UsageError(f"{collector.nodeid}::{name}: sim needs an async function")
        if not collector.config.hook.pytest_asyncio_loop_factories.has_spec():
            raise pytest.UsageError(
                f"{collector.nodeid}::{name}: sim needs pytest-asyncio 1.5 or newer"
            )
        if "asyncio" not in names:
            pytest.mark.asyncio(obj)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Generator[None, LoopFactories | None, LoopFactories]:
    """Run tests marked `sim` on virtual loops; leave other tests unchanged."""
    usual = yield
    cases = _cases(config, item)
    if cases is not None:
        return {f"seed{one.seed}": one for one in cases}
    if usual:
        return usual
    import asyncio

    return {"asyncio": asyncio.new_event_loop}


def _cases(config: pytest.Config, item: pytest.Item) -> list[SeededLoops] | None:
    """Return a loop factory for each seed of a test; None for an unmarked test."""
    marker = item.get_closest_marker("sim")
    if marker is None:
        return None
    settings = dict(marker.kwargs)
    seeds = settings.pop("seeds", None)
    if marker.args or settings:
        raise pytest.UsageError(f"{item.nodeid}: sim takes nothing but seeds=..., by its name")
    chosen = config.getoption("--sim-seed") or _listed(seeds, item)
    return [SeededLoops(seed, permute=seeds is not None) for seed in chosen]


def _listed(seeds: object, item: pytest.Item) -> list[int]:
    if seeds is None:
        return [0]
    if isinstance(seeds, int):
        seeds = range(seeds)
    listed = list(seeds) if isinstance(seeds, Iterable) else []
    if not listed or not all(type(one) is int and one >= 0 for one in listed):
        raise pytest.UsageError(
            f"{item.nodeid}: seeds is how many there are, or a sequence of whole numbers, not {seeds!r}"
        )
    return listed


def _loops_of(item: pytest.Item) -> SeededLoops | None:
    callspec = getattr(item, "callspec", None)
    params = callspec.params.values() if callspec is not None else ()
    return next((one for one in params if isinstance(one, SeededLoops)), None)


# --- running ---


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> SimCase:
    """The seed, the loop and the faults of a test marked `sim`."""
    loops = _loops_of(request.node)
    if loops is None:
        pytest.fail("the fixture sim is for tests marked with pytest.mark.sim", pytrace=False)
    return SimCase(loops, request.config.getoption("--sim-plan"))


@pytest.fixture
def sim_config() -> Config:
    """Configuration of `sim_engine` and of drawn `faults`; test modules may override the fixture."""
    from vsched.sim.cluster import small_config

    return small_config()


@pytest.fixture
def sim_engine(sim: SimCase, sim_config: Config) -> Callable[..., SimEngine]:
    """Return a factory of engines with the seed of the test; use its results with `async with`.

    Takes the arguments of `vsched.sim.cluster.SimEngine`. Failure reports show the faults of the
    last engine.
    """
    from vsched.sim.cluster import SimEngine

    def make(config: Config | None = None, **settings: Any) -> SimEngine:
        engine = SimEngine(config or sim_config, seed=sim.seed, **settings)
        sim.adopt(engine.plan)
        return engine

    return make


@pytest.fixture
def workload(sim: SimCase) -> tuple[Arrival, ...]:
    """A few requests drawn from the seed, which share images and text prefixes."""
    from vsched.sim.cluster.scenario import REQUESTS, draw_arrivals

    return draw_arrivals(sim.rng, REQUESTS)


@pytest.fixture
def faults(sim: SimCase, sim_config: Config) -> FaultPlan:
    """Faults for the groups and the other hosts of `sim_config`, drawn from the seed or given with `--sim-plan`."""
    from vsched.sim.cluster import groups_of
    from vsched.sim.cluster.scenario import SPAN_NS

    return sim.draw_faults(groups_of(sim_config), SPAN_NS, hosts=tuple(sim_config.cluster.hosts))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reset the loops of the seed, which tests with other parameters share."""
    loops = _loops_of(item)
    if loops is not None:
        loops.forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test if an exception on its loop was not retrieved by any task."""
    yield
    loops = _loops_of(item)
    if loops is not None and loops.failures:
        context = loops.failures[0]
        raise AssertionError(f"on the virtual loop: {context['message']}") from context.get(
            "exception"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a section with reproduction instructions to failure reports."""
    report = yield
    loops = _loops_of(item)
    if loops is not None and report.failed:
        report.sections.append(("simulation", _recipe(item, loops)))
    return report


def _recipe(item: pytest.Item, loops: SeededLoops) -> str:
    lines = [f"seed: {loops.seed}"]
    if loops.loop is not None:
        lines.append(f"virtual time: {loops.loop.time():.9f} s")
    if loops.plan is not None:
        lines.append(f"faults: {loops.plan.to_json()}")
    lines.append(f"replay: {_replay_command(item, loops.seed)}")
    return "\n".join(lines)


def _replay_command(item: pytest.Item, seed: int) -> str:
    place = os.path.relpath(item.path, item.config.invocation_params.dir)
    words = ["pytest", place + item.nodeid.removeprefix(item.nodeid.partition("::")[0])]
    if item.config.getoption("--sim-seed"):
        words.append(f"--sim-seed={seed}")
    if plan_path := item.config.getoption("--sim-plan"):
        words.append(f"--sim-plan={plan_path}")
    return shlex.join(words)
