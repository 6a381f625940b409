"""An observed engine on a virtual loop with simulated ranks, so that its true costs are known."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from tests.unit.sim.virtual import current
from vsched.bench.fidelity.measure import ObservedEngine, RequestTexts
from vsched.config import Config
from vsched.config.sections import ArenaConfig, EncodeConfig, GenerateConfig, ModelConfig
from vsched.engine import Environment
from vsched.kernel.commands import Accept, Command
from vsched.kernel.events import Event, Submitted
from vsched.sim.cluster.media import media_of
from vsched.sim.cost.model import CostModel, EncodeCost, GenerateCost
from vsched.sim.faults import FaultPlan
from vsched.sim.ranks.plugin import NAME
from vsched.sim.ranks.rank_process import SimulatedLauncher
from vsched.sim.workload.images import appearance_of, data_url, key_of
from vsched.sim.workload.requests import Arrival, Image
from vsched.sim.world import ORIGIN_NS, Delays, World
from vsched.worker.contract import Preprocessor

COSTS = CostModel(
    name="true",
    source="made up",
    encode=EncodeCost(step_ns=3e6, item_ns=5e5, token_ns=2e5, token_pair_ns=1600.0),
    generate=GenerateCost(
        step_ns=4e6, decode_ns=1e5, context_ns=3e3, prefill_ns=8e4, pair_ns=900.0
    ),
)
WORDS = " ".join(map(str, range(100, 200)))


def settings() -> Config:
    return Config(
        model=ModelConfig(path="simulated", name="simulated"),
        arena=ArenaConfig(pixel_bytes=1 << 20, embedding_bytes=1 << 20),
        encode=EncodeConfig(plugin=NAME, device="simulated"),
        generate=GenerateConfig(
            plugin=NAME,
            device="simulated",
            max_batch_tokens=512,
            chunk_tokens=256,
            slots=8,
            context_tokens=1024,
            memory={"use": "pinned", "tokens": 2048},
        ),
    )


class SimulatedDresser(RequestTexts):
    """Draws pictures for simulated encoders."""

    def __init__(self, preprocessor: Preprocessor, world: World) -> None:
        super().__init__(preprocessor, words=WORDS)
        self._world = world

    def pictures(self, arrival: Arrival) -> list[str]:
        found = []
        for part in arrival.images:
            image = Image(arrival.key_of(part), part.tokens)
            self._world.appearances[key_of(image, arrival.tenant)] = appearance_of(image)
            found.append(data_url(image))
        return found


class Accepted:
    """Announces the contents of requests to simulated ranks."""

    def __init__(self, world: World) -> None:
        self._world = world

    def note(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Accept):
                assert isinstance(event, Submitted)
                self._world.items[command.number] = event.request.items

    def close(self) -> None:
        """No-op."""


@contextlib.asynccontextmanager
async def watched_engine(
    delays: Delays | None = None, costs: CostModel = COSTS
) -> AsyncIterator[tuple[ObservedEngine, SimulatedDresser]]:
    """Start an engine whose ranks take the times of a cost model."""
    loop = current()
    calm = delays or Delays(noise=0.0)
    world = World(
        loop, 0, FaultPlan(seed=0), costs=costs, delays=calm, links=None, origin_ns=ORIGIN_NS
    )
    launcher = SimulatedLauncher(world)
    around = Environment(
        make_launcher=lambda _: launcher,
        make_media=media_of(world),
        open_record=lambda _config, _kernel: Accepted(world),
        now_ns=loop.now_ns,
    )
    async with ObservedEngine(settings(), environment=around) as engine:
        yield engine, SimulatedDresser(engine.preprocessor, world)
