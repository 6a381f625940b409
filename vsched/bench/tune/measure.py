"""Tries ways to share a machine's cores among ranks, and says which one serves most.

What is fastest depends on the model: two replicas of one thread each serve a small model faster than one of two
threads, which wait for one another thousands of times a second; a large model reads its weights twice then. Stages in
processes of their own take the cores from each other; in one process, a step of one waits for that of the other. A
start does not measure it, since it would take minutes and could end otherwise the next time: this is a command, and
what it finds is configuration.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from vsched.api.server import running_server
from vsched.bench.load.client_process_main import LoadOrder
from vsched.bench.load.client_processes import ready_clients, run_clients
from vsched.bench.load.shapes import Case
from vsched.config import Config, toml_value
from vsched.engine import Progress

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
    """What a way of sharing has served: by case the requests a second, a median of the runs, and each run's."""

    placement: Placement
    requests_s: dict[str, float]
    runs: dict[str, list[float]]


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


async def measure_placement(
    placement: Placement,
    config: Config,
    orders: Sequence[LoadOrder],
    *,
    repeats: int,
    on_progress: Progress,
    on_run: Callable[[int], None],
) -> PlacementTrial:
    """Serve all loads with one placement, which `config` has; their addresses are filled in.

    `on_run` is told after each run how many there were.

    Raises:
        BenchError: When a request failed.
        CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: When the engine cannot start.
    """
    runs: dict[str, list[float]] = {order.case.value: [] for order in orders}
    async with running_server(config, on_progress=on_progress) as running:
        # Clients warm up with the seed that follows theirs: no run may meet a prompt that is cached.
        for seed in range(0, 2 * repeats, 2):
            for order in orders:
                sent = msgspec.structs.replace(
                    order, url=running.url, model=running.engine.model_name, seed=seed
                )
                async with ready_clients(sent) as process:
                    figures = await run_clients(process)
                runs[order.case.value].append(figures.requests_s)
                on_run(sum(map(len, runs.values())))
    medians = {case: statistics.median(rates) for case, rates in runs.items()}
    return PlacementTrial(placement=placement, requests_s=medians, runs=runs)


def shares(trials: Sequence[PlacementTrial]) -> list[float]:
    """Return what each has served as a share of the best of each case, a geometric mean over cases."""
    best = {case: max(one.requests_s[case] for one in trials) for case in trials[0].requests_s}
    return [_share(one.requests_s, best) for one in trials]


def _share(rates: Mapping[str, float], best: Mapping[str, float]) -> float:
    logs = [math.log(rate / best[case]) for case, rate in rates.items()]
    return math.exp(statistics.fmean(logs))


def choose(trials: Sequence[PlacementTrial]) -> PlacementTrial:
    """Return the best, or one that is as good but for noise: with fewer replicas or threads, or separate."""
    found = shares(trials)
    enough = max(found) * (1 - CLOSE)
    pairs = zip(trials, found, strict=True)
    return min((one for one, share in pairs if share >= enough), key=lambda one: one.placement)


def orders_of(cases: Sequence[Case], clients: int) -> list[LoadOrder]:
    """Return the loads to try with: three requests a client."""
    return [LoadOrder(case=case, clients=clients, requests=3 * clients) for case in cases]
