"""`vsched tune`: find the best split of this machine's cores among ranks by measurement.

The best split depends on the model: two single-threaded replicas serve a small model faster than
one with two threads, which synchronize thousands of times per second; a large model's weights are
then read twice. Stages in separate processes compete for the cores; in one process, a step of one
waits for the other's. A server does not measure this at start-up, because it would take minutes and
might give another result the next time: this is a command, and its result is configuration.
"""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from vsched.bench.load.shapes import Case
from vsched.checkpoints import local_checkpoint
from vsched.terminal.options import (
    CheckpointArgument,
    ConfigOption,
    JsonOption,
    SetOption,
    check_writable,
    load,
    write_json,
)
from vsched.worker.spec import usable_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from vsched.config import Config
    from vsched.engine import Progress

CASES = (Case.TEXT, Case.IMAGE)
REQUESTS_MIN = 4
"""Minimum requests of a run, and those of the first runs, which determine how many a run has."""
CLOSE = 0.03
"""Required advantage over an earlier split, since each replica has its own weights and KV cache."""
ALONE = (
    "server.port=0",
    "server.api_key_variable=",
    "server.tenant_keys_variable=",
    "record.path=",
    "record.resume=false",
)
"""Settings of a server for the own clients: it asks for no key, and leaves the records of other servers alone."""


class Placement(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A split of the cores between the ranks of both stages."""

    replicas: int
    threads: int
    encode_threads: int
    placement: Literal["separate", "together"] = "separate"

    def settings(self) -> dict[str, int | str]:
        """Return it as configuration: values by key."""
        settings: dict[str, int | str] = {
            "placement": self.placement,
            "generate.replicas": self.replicas,
            "generate.threads": self.threads,
            "encode.threads": self.encode_threads,
        }
        if self.placement == "together":
            settings["encode.replicas"] = self.replicas
        return settings

    def assignments(self) -> list[str]:
        """Return it as assignments for the command line."""
        return [f"{key}={value}" for key, value in self.settings().items()]

    def toml(self) -> str:
        """Return it as a configuration file for `--config`."""
        from vsched.config import toml_value

        return "".join(f"{key} = {toml_value(value)}\n" for key, value in self.settings().items())


class PlacementTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second of each run with a split, by case."""

    placement: Placement
    runs: dict[str, list[float]]

    @property
    def rate(self) -> float:
        """Geometric mean of the cases' median rates."""
        return math.exp(fmean(math.log(median(rates)) for rates in self.runs.values()))


class Tuning:
    """The measurements so far, and the remaining time.

    Attributes:
        requests: Number of requests of a run, by case; empty before the first split.
    """

    def __init__(self, *, splits: int, clients: int, repeats: int, limit_s: float) -> None:
        """Start; `limit_s` counts from now."""
        self.requests: dict[str, int] = {}
        self.trials: list[PlacementTrial] = []
        self.ends_s = time.monotonic() + limit_s
        self._clients, self._repeats = clients, repeats
        self._split_s = limit_s / splits

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.ends_s

    async def measure(self, placement: Placement, config: Config, report: Progress) -> None:
        """Serve each case several times, at least once; the first split determines the lengths of the runs.

        Raises:
            BenchError: When a request failed.
            CheckpointError, ConfigError, DeviceOutOfMemory, GroupLostError: When the engine cannot
                start.
        """
        from vsched.api.server import running_server
        from vsched.bench.load.client_processes import LoadOrder, ready_clients, run_clients

        began_s = time.monotonic()
        async with running_server(config, on_progress=report) as running:
            start_s = time.monotonic() - began_s
            takes_images = running.engine.config.media.images_max > 0
            cases = [case for case in CASES if takes_images or case is Case.TEXT]
            run_s = max(self._split_s - start_s, 0.0) / (self._repeats * len(cases))

            async def rate_of(case: str, requests: int, seed: int) -> float:
                order = LoadOrder(
                    case=Case(case),
                    clients=min(self._clients, requests),
                    requests=requests,
                    seed=seed,
                    url=running.url,
                    model=running.engine.model_name,
                )
                async with ready_clients(order) as process:
                    return (await run_clients(process)).requests_s

            for first in () if self.requests else cases:
                rate = await rate_of(first, REQUESTS_MIN, 1 << 20)
                most = max(min(int(rate * run_s), 3 * self._clients), REQUESTS_MIN)
                self.requests[first] = most
            runs: dict[str, list[float]] = {case: [] for case in self.requests}
            for number in range(self._repeats):
                if number and self.is_over:
                    break
                report("serving", f"{number} of {self._repeats} rounds", number / self._repeats)
                for case, requests in self.requests.items():
                    # Clients warm up with the next seed, so that no run has a cached prompt.
                    runs[case].append(await rate_of(case, requests, 2 * number))
        self.trials.append(PlacementTrial(placement=placement, runs=runs))


def placements(cores: int, *, together: bool) -> list[Placement]:
    """Return the splits to try on `cores` cores, fewer replicas first, and both stages in one process before separate.

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
    return sorted(found, key=lambda one: (one.replicas, one.placement != "together", one.threads))


def choose(trials: Sequence[PlacementTrial]) -> PlacementTrial:
    """Return the best split, or a simpler one within noise: with fewer replicas or threads, or separate."""
    enough = max(one.rate for one in trials) * (1 - CLOSE)
    return min((one for one in trials if one.rate >= enough), key=lambda one: one.placement)


def serve_command(path: str, config: Path | None, sets: Sequence[str]) -> str:
    """Return the command that serves with a file and assignments."""
    options = [*(() if config is None else ("--config", str(config)))]
    options += [word for one in sets for word in ("--set", one)]
    return shlex.join(["vsched", "serve", path, *options])


def tune(
    path: CheckpointArgument,
    config: ConfigOption = None,
    assignments: SetOption = None,
    *,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each load, if time permits.")] = 3,
    limit: Annotated[
        float, typer.Option(min=10, help="Total seconds; a lower limit shortens the runs.")
    ] = 300.0,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the best split as TOML, for --config."),
    ] = None,
    out: JsonOption = None,
) -> None:
    """Serve text, and images if the model takes any, with several splits of the cores; report the fastest here."""
    import asyncio

    import uvloop
    from rich.console import Console

    from vsched.api.http_server import forgo_models
    from vsched.terminal.progress import loading_progress

    check_writable({"--write": write, "--json": out})
    console = Console()
    path = local_checkpoint(path)
    base = [*(assignments or ()), f"model.path={path}", *ALONE]
    plain = load(config, base).config
    encode = plain.encode
    together = encode.replicas > 0 and encode.tensor_parallel == plain.generate.tensor_parallel
    splits = placements(usable_cores(), together=together)
    configs = [load(config, [*base, *one.assignments()]).config for one in splits]
    forgo_models(configs[0])
    tuning = Tuning(splits=len(splits), clients=clients, repeats=repeats, limit_s=limit)
    for number, (split, settings) in enumerate(zip(splits, configs, strict=True), start=1):
        named = " ".join(split.assignments())
        if tuning.is_over:
            console.print(f"Not tried, for time was up (--limit {limit:g}): {named}")
            continue
        console.print(f"{number} of {len(splits)}: {named}")
        with (
            loading_progress(console) as report,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(tuning.measure(split, settings, report))
    best = choose(tuning.trials)
    _show(tuning.trials, best, console)
    sets = [*(assignments or ()), *best.placement.assignments()]
    console.print(serve_command(path, config, sets), soft_wrap=True, markup=False)
    if write is not None:
        write.write_text(best.placement.toml(), encoding="utf-8")
        console.print(f"Written, the split alone: {write}; use it with --config {write}")
    if out is not None:
        write_json(out, tuning.trials)
        console.print(f"JSON: {out}")


def _show(trials: Sequence[PlacementTrial], best: PlacementTrial, console: Console) -> None:
    from rich.table import Table

    table = Table(caption="requests per second: median (minimum to maximum)")
    columns = ("replicas", "threads each", "encode threads", "placement")
    for name in (*columns, *best.runs, "of the best", ""):
        table.add_column(name, justify="right")
    most = max(one.rate for one in trials)
    for one in trials:
        split = one.placement
        table.add_row(
            *(str(split.replicas), str(split.threads), str(split.encode_threads)),
            split.placement,
            *(
                f"{median(rates):.3g} ({min(rates):.3g} to {max(rates):.3g})"
                for rates in one.runs.values()
            ),
            f"{one.rate / most:.0%}",
            "chosen" if one is best else "",
        )
    console.print(table)
