"""Try a policy: its contract, the swarm with it, and the gallery's cases next to the built-in policies."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec

from vsched.config.sections import PoliciesConfig, PolicyTable
from vsched.errors import ConfigError, PolicyError
from vsched.plugins import resolve_policy
from vsched.policy import KERNEL_TABLES, POLICY_TABLES, SEVERAL, Policy, decisions_of
from vsched.policy_host.call_times import QueueClock
from vsched.policy_host.seats import Ask
from vsched.policy_host.stuck_calls import StuckCalls
from vsched.sim.cluster.scenario import SwarmFailure, swarm
from vsched.sim.fast.metrics import SimulationOutcome
from vsched.sim.gallery import CASES, GalleryCase, run_choice, run_policies
from vsched.testing.policy_check import PolicyReport, check_policy

OnProgress = Callable[[str, int, int], None]
"""Called with a part's name, the number of its finished steps, and of all its steps."""


class Effort(msgspec.Struct, frozen=True):
    """Extent of a trial.

    Attributes:
        schedules: Random schedules of `check_policy`.
        scenarios: Scenarios of the swarm.
        all_cases: Whether every case runs, or only those that compare built-in policies of its tables.
        seconds: Maximum time of each part; a part that takes longer ends early.
    """

    schedules: int
    scenarios: int
    all_cases: bool
    seconds: float


THOROUGH = Effort(schedules=60, scenarios=24, all_cases=True, seconds=18.0)
QUICK = Effort(schedules=12, scenarios=5, all_cases=False, seconds=5.0)


class SeatCalls(msgspec.Struct):
    """Calls at one seat in all cases of the gallery."""

    calls: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    failed: int = 0
    overruled: dict[str, int] = {}


class CaseTrial(msgspec.Struct, frozen=True):
    """One case of the gallery: the default first, then the policy unless it was too slow, then built-in policies."""

    case: GalleryCase
    outcomes: list[SimulationOutcome]
    too_slow: bool = False


class PolicyTrial(msgspec.Struct, kw_only=True):
    """Result of a trial.

    Attributes:
        label: Name of the policy in tables.
        tables: Policy tables that it decides for in the swarm and the gallery.
        fields: Fields that were set.
        report: Result of `check_policy`; None if it failed.
        schedules: Number of random schedules that ran.
        problem: The failure of `check_policy`.
        scenarios: Number of scenarios of the swarm that ran.
        failures: Failures of the swarm.
        cases: Cases of the gallery.
        seats: Calls of the policy in the gallery, by table.
        tracebacks: First failure of each type in the gallery.
    """

    label: str
    tables: list[str]
    fields: dict[str, Any] = {}
    report: PolicyReport | None = None
    schedules: int = 0
    problem: PolicyError | None = None
    scenarios: int = 0
    failures: list[SwarmFailure] = []
    cases: list[CaseTrial] = []
    seats: dict[str, SeatCalls] = {}
    tracebacks: dict[str, str] = {}

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not (self.problem or self.failures or self.tracebacks)


def try_policy(
    table: PolicyTable,
    *,
    tables: Sequence[str] = (),
    effort: Effort = THOROUGH,
    on_progress: OnProgress = lambda _part, _done, _total: None,
) -> PolicyTrial:
    """Try the policy of a table `{"use": "module:Class", **fields}`.

    One object with one state makes all its decisions. Of a decision that two stages have (admission, eviction), it
    makes that of the generate stage; `tables` names others.

    Raises:
        ConfigError, PolicyError: When the policy cannot be built, or has no method for one of `tables`.
    """
    policy = resolve_policy(SEVERAL, table, path="policy")
    fields = {name: value for name, value in table.items() if name != "use"}
    trial = PolicyTrial(label=type(policy).__name__, tables=_tables(policy, tables), fields=fields)
    _check(policy, trial, effort, on_progress)
    placed = {path: policy for path in trial.tables if path in KERNEL_TABLES}
    if placed:
        with closing(StuckCalls(PoliciesConfig().call_limit_s)):
            _swarm({**table, "seats": [*placed]}, trial, effort, on_progress)
            if placed.keys() - {"generate.drafting"}:  # simulated texts have no drafts
                _gallery(placed, trial, effort, on_progress)
    return trial


def _tables(policy: Policy, named: Sequence[str]) -> list[str]:
    made = decisions_of(type(policy))
    able = {path: decision for path, decision in POLICY_TABLES.items() if decision in made}
    unable = [path for path in named if path not in able]
    if unable:
        raise ConfigError.of_limit(
            f"{unable[0]}: no table for which {type(policy).__name__} has a method",
            value=repr(unable[0]),
            limit=", ".join(able),
            remedy="name one of these, or none",
        )
    # Tables of the generate stage are after those of the encode stage.
    return list(named) or list({decision: path for path, decision in able.items()}.values())


def _within(part: str, count: int, seconds: float, on_progress: OnProgress) -> Iterator[int]:
    """Yield the numbers of steps until the time is over; at least one."""
    ends_s = time.perf_counter() + seconds
    for number in range(count):
        if number and time.perf_counter() > ends_s:
            break
        on_progress(part, number, count)
        yield number
    on_progress(part, count, count)


def _check(policy: Policy, trial: PolicyTrial, effort: Effort, on_progress: OnProgress) -> None:
    def seeds() -> Iterator[int]:
        for seed in _within("contract", effort.schedules, effort.seconds, on_progress):
            trial.schedules += 1
            yield seed

    try:
        trial.report = check_policy(policy, seeds=seeds())
    except PolicyError as error:
        trial.problem = error


def _swarm(table: PolicyTable, trial: PolicyTrial, effort: Effort, on_progress: OnProgress) -> None:
    words = [f"--set=policy.{key}={json.dumps(value)}" for key, value in table.items()]
    arguments = "".join(f" {shlex.quote(word)}" for word in words)
    for seed in _within("swarm", effort.scenarios, effort.seconds, on_progress):
        outcome = swarm(1, seed=seed, policies={SEVERAL: table}, arguments=arguments)
        trial.scenarios += 1
        trial.failures += outcome.failures
        if trial.failures:
            return


def _gallery(
    placed: Mapping[str, Policy], trial: PolicyTrial, effort: Effort, on_progress: OnProgress
) -> None:
    cases = [case for case in CASES.values() if effort.all_cases or _compared(case, placed)]
    for number, case in enumerate(cases):
        on_progress("gallery", number, len(cases))
        trial.cases.append(_run_case(case, placed, trial, effort.seconds / len(cases)))
    on_progress("gallery", len(cases), len(cases))


def _compared(case: GalleryCase, placed: Mapping[str, Policy]) -> list[str]:
    """Return the choices of a case that are policies for the same tables."""
    return [
        label
        for label, changes in case.choices.items()
        if any(path in placed or path == SEVERAL for path, _ in changes)
    ]


def _run_case(
    case: GalleryCase,
    placed: Mapping[str, Policy],
    trial: PolicyTrial,
    seconds: float,
) -> CaseTrial:
    first = run_policies(case, "default", {})
    watch = CallWatch(placed, seconds)
    own = run_policies(case, trial.label, placed, watch=watch)
    if watch.stopped:
        return CaseTrial(case, [first], too_slow=True)
    for path, calls in watch.seats.items():
        seat = trial.seats.setdefault(path, SeatCalls())
        seat.calls += calls.calls
        seat.total_ns += calls.total_ns
        seat.longest_ns = max(seat.longest_ns, calls.longest_ns)
    for path in placed:
        seat = trial.seats.setdefault(path, SeatCalls())
        seat.failed += own.policy_failure_counts.get(path, 0)
        for use, count in own.figures.policy_overruled.items():
            if use.startswith(f"{path}: "):
                reason = use.removeprefix(f"{path}: ")
                seat.overruled[reason] = seat.overruled.get(reason, 0) + count
    for name, text in own.policy_failures.items():
        trial.tracebacks.setdefault(name, text)
    others = [run_choice(case, label) for label in _compared(case, placed)]
    return CaseTrial(case, [first, own, *others])


_PREEMPTED_NS = 100_000
"""Shorter calls were hardly preempted: the clock of waiting times is not read after them."""


class CallWatch:
    """Times the calls of a policy at some tables, and stops calling it once they took too long together.

    Time in which the thread waited for a core does not count.

    Attributes:
        stopped: Whether they did.
        seats: The calls by table.
    """

    def __init__(self, tables: Mapping[str, object], seconds: float) -> None:
        self.stopped = False
        self.seats: dict[str, SeatCalls] = {}
        self._tables = tables
        self._left_ns = int(seconds * 1e9)
        self._waited_ns = QueueClock()

    def __call__(self, seat: str, ask: Ask) -> Ask:
        """Wrap the call of a seat such as `generate-0.step`."""
        group, _, decision = seat.rpartition(".")
        path = f"{group.partition('-')[0]}.{decision}" if group else decision
        if path not in self._tables:
            return ask
        calls = self.seats.setdefault(path, SeatCalls())
        now_ns, waited_ns = time.perf_counter_ns, self._waited_ns

        def timed(view: Any) -> Any:
            if self._left_ns < 0:
                self.stopped = True
                raise TimeoutError("the policy is too slow for this case")
            before_ns = waited_ns()
            started_ns = now_ns()
            try:
                return ask(view)
            finally:
                took_ns = now_ns() - started_ns
                if took_ns > _PREEMPTED_NS:
                    took_ns -= waited_ns() - before_ns
                self._left_ns -= took_ns
                calls.calls += 1
                calls.total_ns += took_ns
                calls.longest_ns = max(calls.longest_ns, took_ns)

        return timed
