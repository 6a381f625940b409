"""The fast simulator: the production scheduler and policies, an event heap, and groups that only model time.

There is no event loop, network or memory, so a policy can be tried on an hour of load in seconds.
The scheduler decides exactly as in a server that receives the same events at the same times.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from vsched.config import Config, LoadedConfig
from vsched.policy import Policy
from vsched.policy_host.seats import Ask
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
    watch: Callable[[str, Ask], Ask] | None = None,
) -> SimulationOutcome:
    """Simulate a workload on a server with a configuration.

    Args:
        config: The configuration; only settings of the scheduler and of request intake matter.
        workload: The requests; read as time passes.
        cost: The cost model.
        seed: Seed of the step time noise, if the cost model has any.
        oracles: Whether to check all invariants after every event; see `Oracles`.
        progress: Called occasionally with the number of ended requests.
        label: Name of the outcome.
        policies: Replacements for configured policies, by table, such as `encode.encoding`. The table `policy` stands
            for all tables that the policy has methods for and that are not named. An object that several tables name
            has one state for all of them.
        faults: Planned faults; times count from the start of the workload.
        restart_s: From the loss of a group by a fault until it serves again.
        targets: Latency targets for goodput.
        info: The model's shape, if not the cost model's.
        kv_tokens: Tokens of a replica's KV cache, if not pinned by `generate.memory`.
        drafts: Speculative decoding parameters; off by default.
        host_links: Properties of the links to the hosts of `cluster`.
        observers: Called with every event; with observers, the tokens of a step show which slots
            yielded one.
        check_every: Events between full-state checks of the kernel, with `oracles`; by default
            enough to keep them cheap.
        watch: Wraps the call of each policy, for example with a timer; gets the seat's name and the call.

    Raises:
        ConfigError: When the configuration, the model and the faults do not fit together.
        SimulationFailed: When the kernel or an oracle found an error.
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
    if watch is not None:
        simulation.kernel.watch_policies(watch)
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
    """Make garbage collection rare: the kernel creates no cycles, and collection takes a tenth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def header_of(config: Config) -> SegmentHeader:
    """Return the header of a timeline for a run that was not recorded."""
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
