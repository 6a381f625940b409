"""The fast simulator and the simulated engine agree on the cost of a link to another host.

In the engine, frames go through streams with windows, and ranks through sockets; in the fast simulator, bytes have a
rate and a latency. The times to the first token must be alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from vsched.config import Config
from vsched.config.sections import ClusterConfig
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.sim import Arrival, HostLinkProfile, Image, Text, simulate, small_config, workload_of
from vsched.sim.cluster import SimEngine
from vsched.sim.cluster.plugin import plugin
from vsched.sim.ranks.symbolic_model import PATCH_VALUES, PATCHES_PER_TOKEN
from vsched.sim.world import QUICK, Delays

Engines = Callable[..., SimEngine]
SECOND_NS = 1_000_000_000
COST = msgspec.structs.replace(QUICK, bytes_per_token=4 * PATCHES_PER_TOKEN * PATCH_VALUES)
INFO = plugin.inspect("simulated", dtype="float32", item_tokens_max=0)
HOSTS = {"far": "tcp://10.0.0.2:7700", "farther": "tcp://10.0.0.3:7700"}
ARRIVALS = tuple(
    Arrival(
        at_ns=(1 + 2 * index) * SECOND_NS,
        request_id=f"r{index}",
        prompt=(Text(index, 3), Image(f"image {index}", tokens), Text(100 + index, 2)),
        output_tokens=1,
    )
    for index, tokens in enumerate((30, 90, 60, 120))
)


def config(encode: Sequence[str], generate: Sequence[str]) -> Config:
    """Return a server whose prompts are computed in one chunk."""
    cluster = ClusterConfig(hosts=HOSTS, key_file="any", encode=[*encode], generate=[*generate])
    base = small_config(cluster=cluster)
    generate_section = msgspec.structs.replace(
        base.generate, max_batch_tokens=256, chunk_tokens=256
    )
    return msgspec.structs.replace(base, generate=generate_section)


async def engine_ms(sim_engine: Engines, config: Config, links: HostLinkProfile) -> list[float]:
    """Times from submission to the first token in the simulated engine."""
    async with sim_engine(config, costs=COST, delays=Delays(noise=0.0), host_links=links) as engine:
        await engine.run(ARRIVALS)
        await engine.heal()
        assert engine.observer is not None
        return first_tokens_ms(engine.observer.kernel)


def fast_ms(config: Config, links: HostLinkProfile) -> list[float]:
    """The same times in the fast simulator."""
    seen: list[Scheduler] = []

    class Observer:
        def see(
            self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
        ) -> None:
            seen[:] = [kernel]

    load = workload_of("images", ARRIVALS)
    observers = [Observer()]
    simulate(
        config, load, cost=COST, info=INFO, host_links=links, observers=observers, oracles=True
    )
    return first_tokens_ms(seen[0])


def first_tokens_ms(kernel: Scheduler) -> list[float]:
    """Times from submission to the first token of all requests."""
    return [one.ttft_ns / 1e6 for one in kernel.generators[0].measures.first_tokens]


@pytest.mark.sim
@pytest.mark.parametrize(
    ("encode", "generate", "links"),
    [
        (["far"], [], HostLinkProfile(latency_ns=5_000_000, bytes_per_s=400e3)),
        (["far"], [], HostLinkProfile(latency_ns=30_000_000, bytes_per_s=1e6)),
        ([], ["far"], HostLinkProfile(latency_ns=30_000_000, bytes_per_s=1e6)),
        (["far"], ["farther"], HostLinkProfile(latency_ns=30_000_000, bytes_per_s=1e6)),
    ],
    ids=["encoder over a narrow link", "encoder", "generator", "both"],
)
async def test_first_tokens_take_as_long_over_a_link(
    sim_engine: Engines, encode: Sequence[str], generate: Sequence[str], links: HostLinkProfile
) -> None:
    """The fast simulator leaves out the times of decisions and reports themselves, so it is a little ahead."""
    served = config(encode, generate)
    engine, fast = await engine_ms(sim_engine, served, links), fast_ms(served, links)
    least = 2 * links.latency_ns / 1e6
    assert min(fast) > least, "both directions"
    for one, other in zip(engine, fast, strict=True):
        assert 0.92 * one < other < one, (engine, fast)
