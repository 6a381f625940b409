"""Tries ways of splitting a machine's cores among ranks, and reports the fastest.

The best split depends on the model: two single-threaded replicas serve a small model faster than
one with two threads, which synchronize thousands of times per second; a large model's weights are
then read twice. Stages in separate processes compete for the cores; in one process, a step of one
waits for the other's. A server does not measure this at start-up, because it would take minutes and
might give another result the next time: this is a command, and its result is configuration.

It keeps a time limit. A few requests with the first split determine the requests per run and the
number of repeats, so that all splits can be tried. A split that cannot win any more is given up,
which leaves more time for the others.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Literal

import msgspec

from vsched.api.server import running_server
from vsched.bench.load.client_processes import LoadOrder, ready_clients, run_clients
from vsched.bench.load.shapes import Case
from vsched.config import Config, toml_value
from vsched.engine import Progress

LOSES = 0.75
"""A split below this share of the best is given up, since noise cannot explain the gap."""

UNSEEN = 1.25
"""Assumed maximum share of the best in a case that a split has not served yet."""

PROBE_CLIENTS = 4
"""Number of clients for the first requests, and minimum requests of a run."""

RUN_OVERHEAD_S = 2.0
"""Time of a run in addition to its requests: its clients are a process, and warm up."""

CLOSE = 0.03
"""Required advantage over an earlier split, since each replica has its own weights and KV cache."""


class Placement(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A split of the cores between the ranks of both stages."""

    replicas: int
    threads: int
    encode_threads: int
    placement: Literal["separate", "together"] = "separate"

    def settings(self) -> dict[str, dict[str, int | str]]:
        """Return it as configuration, by section; top-level keys have an empty section name."""
        encode: dict[str, int | str] = {"threads": self.encode_threads}
        if self.placement == "together":
            encode["replicas"] = self.replicas
        return {
            "": {"placement": self.placement},
            "generate": {"replicas": self.replicas, "threads": self.threads},
            "encode": encode,
        }

    def assignments(self) -> list[str]:
        """Return it as assignments for the command line."""
        return [
            f"{section}.{key}={value}".removeprefix(".")
            for section, keys in self.settings().items()
            for key, value in keys.items()
        ]

    def toml(self) -> str:
        """Return it as a configuration file for `--config`."""
        return "\n".join(
            (f"[{section}]\n" if section else "")
            + "".join(f"{key} = {toml_value(value)}\n" for key, value in keys.items())
            for section, keys in self.settings().items()
        )


class PlacementTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a split: median requests per second by case, and those of each run.

    `ended` is the reason why it was not served to the end; empty otherwise.
    """

    placement: Placement
    requests_s: dict[str, float]
    runs: dict[str, list[float]]
    ended: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every load was served and the split was not given up."""
        return len(self.requests_s) == len(self.runs) and not self.ended.startswith("given up")


def placements(cores: int, *, together: bool) -> list[Placement]:
    """Return the splits to try on `cores` cores, fewer replicas first.

    `together` says whether one process can serve both stages.
    """
    half = max(cores // 2, 1)
    found = {Placement(replicas=1, threads=half, encode_threads=half)}
    replicas = 1
    while replicas <= cores:
        each = max(cores // replicas, 1)
        found.add(Placement(replicas=replicas, threads=each, encode_threads=half))
        if together:
            found.add(
                Placement(
                    replicas=replicas, threads=each, encode_threads=each, placement="together"
                )
            )
        replicas *= 2
    return sorted(found)


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement plan for each split: requests per run by case, number of repeats, and total seconds."""

    requests: dict[str, int]
    repeats: int
    seconds: float


def plan_runs(
    rates: Mapping[str, float],
    *,
    start_s: float,
    ways: int,
    clients: int,
    repeats: int,
    limit_s: float,
) -> RunPlan:
    """Return a plan that fits into a time limit, given requests per second by case and the start-up time.

    A run has three requests per client, or fewer; if possible one per client, and at least
    `PROBE_CLIENTS`. The number of repeats is the requested one, or fewer, but at least one.
    """
    each_s = (limit_s / ways - start_s) / len(rates)
    for often in range(repeats, 0, -1):
        run_s = each_s / often - RUN_OVERHEAD_S
        requests = {
            case: max(min(int(rate * run_s), 3 * clients), PROBE_CLIENTS)
            for case, rate in rates.items()
        }
        if min(requests.values()) >= clients or often == 1:
            break
    spent_s = sum(RUN_OVERHEAD_S + count / rates[case] for case, count in requests.items())
    return RunPlan(requests=requests, repeats=often, seconds=ways * (start_s + often * spent_s))


Run = Callable[[LoadOrder], Awaitable[float]]
"""Serves a load; returns the requests per second."""


class Tuning:
    """Measurements so far, and the remaining time.

    Attributes:
        plan: Measurement plan; None before the first split.
        trials: Results of the measured splits; the last one may be unfinished.
    """

    def __init__(
        self,
        orders: Sequence[LoadOrder],
        *,
        ways: int,
        repeats: int,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start; `limit_s` counts from now."""
        self.plan: RunPlan | None = None
        self.trials: list[PlacementTrial] = []
        self._orders, self._ways, self._repeats = orders, ways, repeats
        self._clock = clock
        self._ends = clock() + limit_s
        self._start_s = 0.0

    @property
    def left_s(self) -> float:
        """The remaining seconds."""
        return self._ends - self._clock()

    def has_time(self) -> bool:
        """Return True if another split can be started and serve every load once."""
        if self.plan is None:
            return True
        once_s = self.plan.seconds / self._ways - self._start_s
        return self.left_s > self._start_s + once_s / self.plan.repeats

    async def probe(self, run: Run, *, start_s: float) -> RunPlan:
        """Plan the runs from a few requests of each load, after a start-up of `start_s`."""
        self._start_s = start_s
        rates = {}
        for order in self._orders:
            few = min(order.clients, PROBE_CLIENTS)
            rates[order.case.value] = await run(
                msgspec.structs.replace(order, clients=few, requests=few, seed=1 << 20, warmup=few)
            )
        self.plan = plan_runs(
            rates,
            start_s=start_s,
            ways=self._ways,
            clients=max(order.clients for order in self._orders),
            repeats=self._repeats,
            limit_s=self.left_s + start_s,
        )
        return self.plan

    async def measure(
        self, placement: Placement, run: Run, *, on_run: Callable[[int], None] = lambda _: None
    ) -> PlacementTrial:
        """Serve the planned loads until the split has lost or time is up.

        `on_run` is called with the number of runs so far.
        """
        assert self.plan is not None, "the first way was probed"
        runs: dict[str, list[float]] = {order.case.value: [] for order in self._orders}
        ended = ""
        # Clients warm up with the next seed, so that no run has a cached prompt.
        for seed in range(0, 2 * self.plan.repeats, 2):
            for order in self._orders:
                case = order.case.value
                if runs[case] and self.left_s < self._expected_s(runs[case], case):
                    ended = "time was up"
                    break
                count = self.plan.requests[case]
                clients = min(order.clients, count)
                sent = msgspec.structs.replace(
                    order, clients=clients, requests=count, seed=seed, warmup=1
                )
                runs[case].append(await run(sent))
                on_run(sum(map(len, runs.values())))
                share = self._bound(runs)
                if share < LOSES:
                    ended = f"given up: {share:.0%} of the best at most"
                    break
            if ended:
                break
        medians = {case: statistics.median(rates) for case, rates in runs.items() if rates}
        trial = PlacementTrial(placement=placement, requests_s=medians, runs=runs, ended=ended)
        self.trials.append(trial)
        return trial

    def _expected_s(self, rates: Sequence[float], case: str) -> float:
        assert self.plan is not None
        return RUN_OVERHEAD_S + self.plan.requests[case] / min(rates)

    def _bound(self, runs: Mapping[str, Sequence[float]]) -> float:
        """Return the largest final share of the best that a split can still reach."""
        best = best_rates(self.trials)
        if not best:
            return 1.0
        reached = [
            statistics.median(rates) / best[case] if rates else UNSEEN
            for case, rates in runs.items()
        ]
        return math.exp(statistics.fmean(map(math.log, reached)))


def best_rates(trials: Sequence[PlacementTrial]) -> dict[str, float]:
    """Return the best rate of each case over the completely served splits."""
    whole = [one.requests_s for one in trials if one.is_whole]
    return {case: max(rates[case] for rates in whole) for case in whole[0]} if whole else {}


@contextlib.asynccontextmanager
async def served(config: Config, *, on_progress: Progress) -> AsyncIterator[Run]:
    """Serve with a configuration; yields a function that runs a load.

    Raises:
        BenchError: When a request failed.
        CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: When the engine cannot
            start.
    """
    async with running_server(config, on_progress=on_progress) as running:

        async def run(order: LoadOrder) -> float:
            sent = msgspec.structs.replace(order, url=running.url, model=running.engine.model_name)
            async with ready_clients(sent) as process:
                return (await run_clients(process)).requests_s

        yield run


def shares(trials: Sequence[PlacementTrial]) -> list[float]:
    """Return each result as a share of the best, by geometric mean over the served cases."""
    best = best_rates(trials)
    return [_share(one.requests_s, best) for one in trials]


def _share(rates: Mapping[str, float], best: Mapping[str, float]) -> float:
    logs = [math.log(rate / best[case]) for case, rate in rates.items()]
    return math.exp(statistics.fmean(logs))


def choose(trials: Sequence[PlacementTrial]) -> PlacementTrial:
    """Return the best split, or a simpler one within noise: with fewer replicas or threads, or separate."""
    trials = [one for one in trials if one.is_whole]
    found = shares(trials)
    enough = max(found) * (1 - CLOSE)
    pairs = zip(trials, found, strict=True)
    return min((one for one, share in pairs if share >= enough), key=lambda one: one.placement)


def orders_of(cases: Sequence[Case], clients: int) -> list[LoadOrder]:
    """Return the loads to try: three requests per client."""
    return [LoadOrder(case=case, clients=clients, requests=3 * clients) for case in cases]
