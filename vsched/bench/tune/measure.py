"""Tries ways to share a machine's cores among ranks, and says which one serves most.

What is fastest depends on the model: two replicas of one thread each serve a small model faster than one of two
threads, which wait for one another thousands of times a second; a large model reads its weights twice then. Stages in
processes of their own take the cores from each other; in one process, a step of one waits for that of the other. A
start does not measure it, since it would take minutes and could end otherwise the next time: this is a command, and
what it finds is configuration.

It has a time, which it keeps. The first way is tried with a few requests first, and how fast those were says how many
requests a run can have, and how often it can be repeated, for all ways to be tried. A way that cannot win any more is
given up, and so there is time left for the others.
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
from vsched.bench.load.client_process_main import LoadOrder
from vsched.bench.load.client_processes import ready_clients, run_clients
from vsched.bench.load.shapes import Case
from vsched.config import Config, toml_value
from vsched.engine import Progress

LOSES = 0.75
"""A way whose share of the best is below this, whatever noise, is given up."""

UNSEEN = 1.25
"""What a way may reach of the best in a case that it has not served yet, when that is judged."""

PROBE_CLIENTS = 4
"""Clients of the first requests of all, and the fewest requests of a run."""

RUN_OVERHEAD_S = 2.0
"""What a run takes beside its requests: its clients are a process, and warm up."""

CLOSE = 0.03
"""A way has to be better by this share than one before it: each replica has weights and a KV cache of its own."""


class Placement(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """How the ranks of both stages share the cores."""

    replicas: int
    threads: int
    encode_threads: int
    placement: Literal["separate", "together"] = "separate"

    def settings(self) -> dict[str, dict[str, int | str]]:
        """Return it as configuration, by section; the first has no name."""
        encode: dict[str, int | str] = {"threads": self.encode_threads}
        if self.placement == "together":
            encode["replicas"] = self.replicas
        return {
            "": {"placement": self.placement},
            "generate": {"replicas": self.replicas, "threads": self.threads},
            "encode": encode,
        }

    def assignments(self) -> list[str]:
        """Return it as assignments of the command line."""
        return [
            f"{section}.{key}={value}".removeprefix(".")
            for section, keys in self.settings().items()
            for key, value in keys.items()
        ]

    def toml(self) -> str:
        """Return it as a file of configuration, for `--config`."""
        return "\n".join(
            (f"[{section}]\n" if section else "")
            + "".join(f"{key} = {toml_value(value)}\n" for key, value in keys.items())
            for section, keys in self.settings().items()
        )


class PlacementTrial(msgspec.Struct, frozen=True, kw_only=True):
    """What a way of sharing has served: by case the requests a second, a median of the runs, and each run's.

    `ended` says why it was not served to the end, and is empty where it was.
    """

    placement: Placement
    requests_s: dict[str, float]
    runs: dict[str, list[float]]
    ended: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every load was served, and nothing says that it lost."""
        return len(self.requests_s) == len(self.runs) and not self.ended.startswith("given up")


def placements(cores: int, *, together: bool) -> list[Placement]:
    """Return the placements to try on `cores` cores, those with fewer replicas first.

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
    """How each way is measured: requests of a run by case, how often, and the seconds that all of it will take."""

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
    """Return what fits into a time, given the requests a second by case and the seconds of a start.

    A run has three requests a client, or fewer; at best one a client, and at least `PROBE_CLIENTS`. It is repeated as
    often as asked, or less often, once at least.
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
"""Serves a load; returns the requests a second."""


class Tuning:
    """What has been measured by now, and what there is time for.

    Attributes:
        plan: How ways are measured; None before the first.
        trials: What the ways have served that were measured, the one last begun at the end.
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
        """Begin; `limit_s` counts from now."""
        self.plan: RunPlan | None = None
        self.trials: list[PlacementTrial] = []
        self._orders, self._ways, self._repeats = orders, ways, repeats
        self._clock = clock
        self._ends = clock() + limit_s
        self._start_s = 0.0

    @property
    def left_s(self) -> float:
        """The seconds that are left."""
        return self._ends - self._clock()

    def has_time(self) -> bool:
        """Return whether another way can be started and serve every load once."""
        if self.plan is None:
            return True
        once_s = self.plan.seconds / self._ways - self._start_s
        return self.left_s > self._start_s + once_s / self.plan.repeats

    async def probe(self, run: Run, *, start_s: float) -> RunPlan:
        """Plan the runs by a few requests of each load, after a start that took `start_s`."""
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
        """Serve the loads as planned, until a way has lost or time is up; `on_run` is told how many runs there were."""
        assert self.plan is not None, "the first way was probed"
        runs: dict[str, list[float]] = {order.case.value: [] for order in self._orders}
        ended = ""
        # Clients warm up with the seed that follows theirs: no run may meet a prompt that is cached.
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
        """Return the largest share of the best that a way may have in the end."""
        best = best_rates(self.trials)
        if not best:
            return 1.0
        reached = [
            statistics.median(rates) / best[case] if rates else UNSEEN
            for case, rates in runs.items()
        ]
        return math.exp(statistics.fmean(map(math.log, reached)))


def best_rates(trials: Sequence[PlacementTrial]) -> dict[str, float]:
    """Return the best of each case that some way has served to the end."""
    whole = [one.requests_s for one in trials if one.is_whole]
    return {case: max(rates[case] for rates in whole) for case in whole[0]} if whole else {}


@contextlib.asynccontextmanager
async def served(config: Config, *, on_progress: Progress) -> AsyncIterator[Run]:
    """Serve with a configuration; yields what runs a load.

    Raises:
        BenchError: When a request failed.
        CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: When the engine cannot start.
    """
    async with running_server(config, on_progress=on_progress) as running:

        async def run(order: LoadOrder) -> float:
            sent = msgspec.structs.replace(order, url=running.url, model=running.engine.model_name)
            async with ready_clients(sent) as process:
                return (await run_clients(process)).requests_s

        yield run


def shares(trials: Sequence[PlacementTrial]) -> list[float]:
    """Return what each has served as a share of the best, a geometric mean over the cases that it has served."""
    best = best_rates(trials)
    return [_share(one.requests_s, best) for one in trials]


def _share(rates: Mapping[str, float], best: Mapping[str, float]) -> float:
    logs = [math.log(rate / best[case]) for case, rate in rates.items()]
    return math.exp(statistics.fmean(logs))


def choose(trials: Sequence[PlacementTrial]) -> PlacementTrial:
    """Return the best, or one that is as good but for noise: with fewer replicas or threads, or separate."""
    trials = [one for one in trials if one.is_whole]
    found = shares(trials)
    enough = max(found) * (1 - CLOSE)
    pairs = zip(trials, found, strict=True)
    return min((one for one, share in pairs if share >= enough), key=lambda one: one.placement)


def orders_of(cases: Sequence[Case], clients: int) -> list[LoadOrder]:
    """Return the loads to try with: three requests a client."""
    return [LoadOrder(case=case, clients=clients, requests=3 * clients) for case in cases]
