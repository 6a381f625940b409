"""A model whose layers keep a state, served: a killed rank, a shared beginning, a record, a simulation."""

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
from vsched.aio.streams.stream import TokenStream
from vsched.config import load_config
from vsched.record import replay
from vsched.sim.cost.model import load_cost_model
from vsched.sim.setup import prepare

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

OUTPUTS = 100
SHARED = list(range(20, 68))
"""Three blocks, which every prompt begins with."""
PROMPTS = [SHARED + list(range(100, 100 + 25 * n)) for n in range(1, 7)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("hybrid") / "qwen3_next"
    make_checkpoint("qwen3_next", path)
    sets = [one for one in SETTINGS if not one.startswith("generate.context_tokens")]
    sets += [f"model.path={path}", f"record.path={path.parent / 'run.vlog'}"]
    return load_config(None, sets=sets, environ={}).config


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hybrid(config: Config) -> AsyncIterator[Engine]:
    async with Engine(config) as engine:
        yield engine
        await assert_idle(engine)
    report = replay(Path(config.record.path))
    assert report.difference is None
    assert report.events > 100


async def begin(engine: Engine, prompt: list[int], name: str) -> TokenStream:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUTS)
    async with patience():
        return await engine.generate(prompt=prompt, sampling=sampling, request_id=name)


async def test_killed_rank_loses_no_token_and_every_beginning_has_its_own_state(
    hybrid: Engine, config: Config
) -> None:
    """Steps run one ahead, requests are preempted, and all is lost once: the tokens are those of `generate`."""
    wanted = generated(Path(config.model.path), PROMPTS, outputs=OUTPUTS)
    begun = [await begin(hybrid, prompt, f"hybrid-{n}") for n, prompt in enumerate(PROMPTS)]
    await until(lambda: sum(one.output_tokens for one in begun) > 60, "streams are under way")
    assert sum(one.reason is None for one in begun) > 3, "too late to lose anything"
    (pid,) = hybrid.rank_pids
    os.kill(pid, signal.SIGKILL)
    found = await asyncio.gather(*(read(one) for one in begun))
    assert [one.token_ids for one in found] == wanted
    await until(lambda: hybrid.state == "ready", "the lost group is back")
    counts = hybrid.statistics()["generate"]
    assert counts["preemptions"] > 0
    for number, prompt in enumerate(PROMPTS):
        again = await read(await begin(hybrid, prompt, f"again-{number}"))
        assert again.token_ids == wanted[number]
    cached = hybrid.statistics()["generate"]["tokens_cached"] - counts["tokens_cached"]
    assert cached >= len(SHARED) * 3, "snapshots are used"


async def test_states_of_all_slots_are_in_the_ledger_and_in_the_metrics(hybrid: Engine) -> None:
    size = 16 * hybrid.info.state_bytes
    assert hybrid.ledger is not None
    lines = {(line.owner, line.line): line.bytes for line in hybrid.ledger.lines}
    assert lines["generate rank 0", "state"] == size > 0
    statistics = hybrid.statistics()
    assert statistics["ledger"]["in_use"]["state"] == 0, "nothing runs"
    assert statistics["ranks"]["generate"]["0"]["state"] == size


async def test_simulation_of_such_a_model_has_its_snapshots(hybrid: Engine, config: Config) -> None:
    setup = prepare(config, load_cost_model("tiny25"), info=hybrid.info)
    assert (setup.limits.prefix_cache, setup.limits.state_snapshots) == (True, 8)
