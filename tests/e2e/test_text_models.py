"""A text model that keeps states, served: a killed rank, a shared prefix, a record, a simulation."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.asking import read
from tests.e2e.conftest import SETTINGS, assert_idle
from tests.parity.architectures import make_checkpoint
from tests.parity.compare import generated
from tests.patience import patience, until
from vsched import Config, Engine, SamplingParams
from vsched.aio.streams import Generation
from vsched.config import load_config
from vsched.record import replay
from vsched.sim.cost.model import load_cost_model
from vsched.sim.fast.simulation import simulate
from vsched.sim.setup import prepare
from vsched.sim.workload.requests import Arrival, Text, workload_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

OUTPUTS = 100
SHARED = list(range(20, 68))
"""Three blocks, which every prompt begins with."""
PROMPTS = [SHARED + list(range(100, 100 + 25 * n)) for n in range(1, 7)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("text") / "qwen3_next"
    make_checkpoint("qwen3_next", path)
    sets = [one for one in SETTINGS if not one.startswith("generate.context_tokens")]
    sets += [f"model.path={path}", f"record.path={path.parent / 'run.vlog'}"]
    return load_config(None, sets=sets, environ={}).config


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(config: Config) -> AsyncIterator[Engine]:
    async with Engine(config) as engine:
        yield engine
        await assert_idle(engine)
    report = replay(Path(config.record.path))
    assert report.difference is None
    assert report.events, (
        "tests of this module may be shared out among processes, so there may be few"
    )


async def begin(engine: Engine, prompt: list[int], name: str) -> Generation:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUTS)
    async with patience():
        return await engine.generate(prompt=prompt, sampling=sampling, request_id=name)


async def test_killed_rank_loses_no_token_and_every_beginning_has_its_own_state(
    served: Engine, config: Config
) -> None:
    """Steps run one ahead, requests are preempted, and all is lost once: the tokens equal those of `generate`."""
    wanted = generated(Path(config.model.path), PROMPTS, outputs=OUTPUTS)
    started = [await begin(served, prompt, f"first-{n}") for n, prompt in enumerate(PROMPTS)]
    await until(lambda: sum(one.output_tokens for one in started) > 60, "streams are running")
    assert sum(one.reason is None for one in started) > 3, "too late to lose anything"
    (pid,) = served.rank_pids
    os.kill(pid, signal.SIGKILL)
    found = await asyncio.gather(*(read(one) for one in started))
    assert [one.token_ids for one in found] == wanted
    await until(lambda: served.state == "ready", "the lost group is back")
    counts = served.statistics()["generate"]
    assert counts["preemptions"] > 0
    for number, prompt in enumerate(PROMPTS):
        again = await read(await begin(served, prompt, f"again-{number}"))
        assert again.token_ids == wanted[number]
    cached = served.statistics()["generate"]["tokens_cached"] - counts["tokens_cached"]
    assert cached >= len(SHARED) * 3, "snapshots are used"


async def test_states_of_all_slots_are_in_the_ledger_and_in_the_metrics(served: Engine) -> None:
    size = 16 * served.info.state_bytes
    assert size > 0
    assert served.ledger is not None
    lines = {(line.owner, line.line): line.bytes for line in served.ledger.lines}
    assert lines.get(("generate rank 0", "state"), 0) == size
    statistics = served.statistics()
    assert statistics["ledger"]["in_use"].get("state", 0) == 0, "nothing runs"
    assert statistics["ranks"]["generate"]["0"].get("state", 0) == size


async def test_simulation_takes_the_model_as_it_is_served(served: Engine, config: Config) -> None:
    """With its snapshots; requests that share a prefix find it, and each ends."""
    cost = load_cost_model("tiny25")
    limits = prepare(config, cost, info=served.info).limits
    assert (limits.prefix_cache, limits.state_snapshots) == (True, 8)
    arrivals = [
        Arrival(
            at_ns=n * 500_000_000,
            request_id=f"r{n}",
            prompt=(Text(1, len(SHARED)), Text(10 + n, 25 * n + 1)),
            output_tokens=40,
        )
        for n in range(6)
    ]
    workload = workload_of("shared", arrivals)
    figures = simulate(config, workload, cost=cost, info=served.info, oracles=True).figures
    assert (figures.finished, figures.failed) == (6, {})
    assert figures.prefix_hits > 0
