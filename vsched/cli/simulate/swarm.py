"""`vsched simulate --swarm N`: whole engines with random faults, until one breaks an invariant."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vsched.errors import ConfigError, limit_message
from vsched.terminal.options import load

if TYPE_CHECKING:
    from vsched.config import LoadedConfig
    from vsched.config.section import PolicyTable


def run_swarm(
    count: int,
    *,
    seed: int,
    faults: Path | None,
    configs: Sequence[Path] = (),
    assignments: Sequence[str] = (),
    probes: bool = False,
) -> None:
    """Run `count` scenarios; report the results, and the command that reproduces a failure; list `probes` if asked.

    The policies set in the configuration replace the drawn ones; the shapes of the engines are
    still drawn.

    Raises:
        ConfigError: When the plan or the configuration cannot be read, or there are several
            configurations.
        typer.Exit: With status 1, when a scenario failed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vsched.probes import PROBES
    from vsched.sim.cluster.scenario import swarm

    if len(configs) > 1:
        raise ConfigError(
            limit_message(
                "--config with --swarm",
                value=f"{len(configs)} files",
                limit="one",
                remedy="give one configuration with the policies to test",
            )
        )
    loaded = load(configs[0] if configs else None, [*assignments])
    policies, unused = _policies_of(loaded)
    words = [*(f"--config={path}" for path in configs), *(f"--set={one}" for one in assignments)]
    columns = (TextColumn("swarm"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started_s = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("swarm", total=count)
        outcome = swarm(
            count,
            seed=seed,
            faults=faults,
            policies=policies,
            arguments="".join(f" {shlex.quote(word)}" for word in words),
            on_report=lambda _seed, _report: bars.advance(task),
        )
    took_s = time.perf_counter() - started_s
    console = Console()
    if unused:
        console.print(
            f"ignored, since the swarm draws the shapes of its engines: {', '.join(unused)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    for failure in outcome.failures:
        console.print(failure.describe(), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{outcome.scenarios} scenarios in {took_s:.1f} s, {outcome.virtual_s:.0f} s of virtual time: "
        f"{outcome.requests} requests, {outcome.events} events, {outcome.struck} faults, "
        f"{outcome.losses} groups lost, {len(outcome.failures)} scenarios failed",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    reached = len(outcome.probes) - len(outcome.unreached)
    console.print(f"{reached} of {len(outcome.probes)} probes reached", highlight=False)
    if probes:
        for name, scenarios in outcome.probes.items():
            line = f"| `{name}` | {PROBES[name]} | {scenarios} |"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if outcome.failures:
        raise typer.Exit(1)


def _policies_of(loaded: LoadedConfig) -> tuple[dict[str, PolicyTable], list[str]]:
    """Return the policy tables that are set explicitly, and all other explicitly set keys."""
    from vsched.config.loading import DEFAULT
    from vsched.config.policies import policy_table
    from vsched.policy import KERNEL_TABLES, SEVERAL

    policies: dict[str, PolicyTable] = {}
    unused: list[str] = []
    for key, origin in loaded.origins.items():
        if origin == DEFAULT:
            continue
        table = next((one for one in (*KERNEL_TABLES, SEVERAL) if key.startswith(f"{one}.")), None)
        if table is None:
            unused.append(key)
        else:
            policies[table] = policy_table(loaded.config, table)
    return policies, unused
