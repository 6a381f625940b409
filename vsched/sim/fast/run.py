"""The fast simulator: the production scheduler and policies, a heap of events, and groups that only take time.

There is no event loop, no wire and no memory here, so a policy can be tried on an hour of load in seconds. What the
scheduler decides is what it would decide in a server that hears the same events at the same times.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from vsched.config import Config, LoadedConfig
from vsched.policy import Policy
from vsched.record.entries import SegmentHeader
from vsched.sim.cost.model import CostModel
from vsched.sim.fast.faults import group_faults
from vsched.sim.fast.metrics import SimulationOutcome, Targets
from vsched.sim.fast.simulation import EventObserver, OnRequests, Simulation
from vsched.sim.faults.plan import FaultPlan
from vsched.sim.invariants import Oracles
from vsched.sim.network.lane import HostLinkProfile
from vsched.sim.setup import DraftLuck, prepare
from vsched.sim.workload.requests import Workload
from vsched.types import ModelInfo


def simulate(
    config: Config | LoadedConfig,
    workload: Workload,
    *,
    cost: CostModel,
    seed: int = 0,
    oracles: bool = False,
    progress: OnRequests | None = None,
    label: str = "",
    policies: Mapping[str, Policy] | None = None,
    faults: FaultPlan | None = None,
    restart_s: float = 10.0,
    targets: Targets | None = None,
    info: ModelInfo | None = None,
    kv_tokens: int | None = None,
    drafts: DraftLuck | None = None,
    host_links: HostLinkProfile | None = None,
    observers: Sequence[EventObserver] = (),
    check_every: int | None = None,
) -> SimulationOutcome:
    """Simulate a workload on a server with a configuration; return what came of it.

    Args:
        config: The configuration; only what the scheduler and the ingress of requests read counts.
        workload: The requests; they are read as time passes.
        cost: What steps take.
        seed: Of the noise of step times, if the cost model has any.
        oracles: Whether to check everything after every event; see `Oracles`.
        progress: Told now and then how many requests have ended.
        label: What to call the outcome.
        policies: Policies that take the place of configured ones, by table, such as `encode.encoding`.
        faults: What goes wrong, and when; the times count from the beginning of the workload.
        restart_s: From the loss of a group by a fault until it serves again.
        targets: What counts as goodput.
        info: The model's shape, where it is not the cost model's.
        kv_tokens: Tokens of a replica's KV cache, where they are not what `generate.memory` pins.
        drafts: What comes of drafts; without it nobody drafts.
        host_links: What the links to the hosts of `cluster` are like.
        observers: See every event; with them the tokens of a step tell which slots yielded.
        check_every: Events between two checks of the kernel's whole state, with `oracles`; by default as many as keep
            them affordable.

    Raises:
        ConfigError: When the configuration, the model and the faults do not go together.
        SimulationFailed: When the kernel or an oracle found something wrong.
    """
    setup = prepare(config, cost, policies=policies, info=info, kv_tokens=kv_tokens, drafts=drafts)
    simulation = Simulation(
        setup,
        cost,
        seed=seed,
        targets=targets or Targets(),
        observers=observers,
        host_links=host_links,
    )
    if faults is not None:
        simulation.schedule(group_faults(faults, setup.config, restart_s=restart_s))
    if oracles:
        simulation.check_with(Oracles(setup, check_every=check_every))
    started_s = time.perf_counter()
    with _rare_collections():
        simulation.run(workload, progress)
    wall_s = time.perf_counter() - started_s
    return simulation.outcome(label or workload.name, workload, wall_s)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for cycles rarely: the kernel makes none, and looking takes a tenth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def header_of(config: Config) -> SegmentHeader:
    """Return what a timeline begins with, of a run that was not recorded."""
    return SegmentHeader(
        run=b"",
        segment=1,
        version="",
        started_s=0.0,
        number=0,
        config=msgspec.to_builtins(config),
        limits={},
        policies={},
        state=b"",
    )
