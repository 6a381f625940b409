"""The swarm: runs many scenarios drawn from seeds, each with its own faults, until one breaks an invariant.

Each scenario has a random subset of fault kinds, and its own engine and requests. A failure is
reported with its seed, its minimized fault plan as JSON, and the command that reproduces it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec

from vsched.config.sections import PolicyTable
from vsched.probes import PROBES, observed
from vsched.sim.cluster.scenario import Scenario, ScenarioReport, draw_scenario, run_scenario
from vsched.sim.faults.plan import FaultPlan

OnReport = Callable[[int, ScenarioReport], None]
"""Called after each scenario with its seed."""


class SwarmFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed scenario.

    Attributes:
        violations: The violated invariants.
        plan: The minimized plan: without any of these faults, the scenario passes.
        dropped: Number of faults removed from the plan.
        arguments: Further arguments of the command that reproduces it.
    """

    seed: int
    violations: tuple[str, ...]
    plan: FaultPlan
    dropped: int
    arguments: str = ""

    @property
    def command(self) -> str:
        """The command that reproduces the failure.

        With the plan in a file, `--faults FILE` limits it to the minimized plan.
        """
        return f"vsched simulate --swarm 1 --seed {self.seed}{self.arguments}"

    def describe(self) -> str:
        """Return seed, violations, faults and the reproducing command, one per line."""
        dropped = f" ({self.dropped} more that it fails without)" if self.dropped else ""
        return "\n".join(
            [
                f"seed {self.seed} fails:",
                *(f"  {line}" for line in self.violations),
                f"faults{dropped}: {self.plan.to_json()}",
                f"replay: {self.command}",
            ]
        )


class SwarmOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a swarm; counts are sums over its scenarios.

    Attributes:
        probes: Number of scenarios that reached each probe, in declaration order; 0 if none did.
    """

    scenarios: int
    failures: list[SwarmFailure]
    requests: int
    events: int
    losses: int
    struck: int
    virtual_s: float
    probes: dict[str, int]

    @property
    def unreached(self) -> list[str]:
        """The probes that no scenario reached."""
        return [name for name, scenarios in self.probes.items() if not scenarios]


def swarm(
    count: int,
    *,
    seed: int = 0,
    faults: str | Path | None = None,
    twice: bool = False,
    failures_max: int = 1,
    policies: Mapping[str, PolicyTable] = MappingProxyType({}),
    arguments: str = "",
    on_report: OnReport = lambda _seed, _report_on: None,
) -> SwarmOutcome:
    """Run `count` scenarios with consecutive seeds, starting at `seed`.

    Args:
        count: Number of scenarios.
        seed: The first seed.
        faults: File with a fault plan that replaces the drawn ones.
        twice: Run each scenario twice and compare the digests.
        failures_max: Stop after this number of failures.
        policies: Policy tables, by path, that replace the drawn ones.
        arguments: Further arguments of the command that reproduces a failure.
        on_report: Called with the report of each scenario.

    Raises:
        ConfigError: When the plan cannot be read.
    """
    plan = FaultPlan.load(faults) if faults is not None else None
    failures: list[SwarmFailure] = []
    reports: list[ScenarioReport] = []
    probes = dict.fromkeys(PROBES, 0)
    with _quiet():
        for one in range(seed, seed + count):
            scenario = draw_scenario(one).with_policies(policies)
            if plan is not None:
                scenario = scenario.with_faults(plan)
            report = run_guarded(scenario, twice=twice)
            reports.append(report)
            on_report(one, report)
            for name in report.probes:
                probes[name] += 1
            if report.violations:
                shortened = _shortened(scenario, report, twice=twice)
                failures.append(msgspec.structs.replace(shortened, arguments=arguments))
                if len(failures) >= failures_max:
                    break
    return SwarmOutcome(
        scenarios=len(reports),
        failures=failures,
        requests=sum(sum(report.outcomes.values()) for report in reports),
        events=sum(report.events for report in reports),
        losses=sum(report.losses for report in reports),
        struck=sum(report.struck for report in reports),
        virtual_s=sum(report.virtual_s for report in reports),
        probes=probes,
    )


def run_guarded(scenario: Scenario, *, twice: bool = False) -> ScenarioReport:
    """Run a scenario; report an exception, or a different digest on the second run, as a violation."""
    try:
        with observed() as probes:
            report = run_scenario(scenario)
        report = msgspec.structs.replace(report, probes=dict(probes))
        if twice and not report.violations:
            again = run_scenario(scenario)
            if again.digest != report.digest:
                words = f"the second run differs: digest {again.digest} instead of {report.digest}"
                return msgspec.structs.replace(report, violations=(words,))
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
        return ScenarioReport(violations=(f"{type(error).__name__}: {error}",))
    return report


def _shortened(scenario: Scenario, report: ScenarioReport, *, twice: bool) -> SwarmFailure:
    """Minimize the plan: remove each fault without which the scenario still fails; the others are unaffected."""
    plan = scenario.plan
    for fault in reversed(scenario.plan.faults):
        fewer = msgspec.structs.replace(
            plan, faults=tuple(one for one in plan.faults if one is not fault)
        )
        shorter = run_guarded(scenario.with_faults(fewer), twice=twice)
        if shorter.violations:
            plan, report = fewer, shorter
    return SwarmFailure(
        seed=scenario.seed,
        violations=report.violations,
        plan=plan,
        dropped=len(scenario.plan.faults) - len(plan.faults),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs of engines that are broken on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
