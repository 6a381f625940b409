"""Text models that keep states or share a latent cache: a killed rank, a shared prefix, and a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.asking import read
from tests.e2e.conftest import SETTINGS, assert_idle
from tests.e2e.losing import answers_over_a_kill
from tests.parity.architectures import make_checkpoint
from tests.parity.compare import generated
from tests.patience import patience
from vsched import Engine, SamplingParams
from vsched.aio.streams import Generation
from vsched.config import load_config
from vsched.record import replay

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]

OUTPUTS = 60
SHARED = list(range(20, 68))
"""Three blocks, which every prompt begins with."""
PROMPTS = [SHARED + list(range(100, 100 + 25 * n)) for n in range(1, 7)]


async def begin(engine: Engine, prompt: list[int], name: str) -> Generation:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUTS)
    async with patience():
        return await engine.generate(prompt=prompt, sampling=sampling, request_id=name)


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        ("qwen3_next", 1),  # keeps a state for each request, and snapshots for its prefix cache
        # Two ranks that each keep the whole KV cache.
        pytest.param("deepseek_v3", 2, marks=pytest.mark.thorough),
    ],
)
async def test_killed_rank_loses_no_token_and_shared_prefixes_are_cached(
    model: str, ranks: int, tmp_path: Path
) -> None:
    """Steps run one ahead, requests are preempted, and all is lost once: the tokens equal those of `generate`."""
    path, record = tmp_path / model, tmp_path / "run.vlog"
    make_checkpoint(model, path)
    sets = [one for one in SETTINGS if not one.startswith("generate.context_tokens")]
    sets += [f"model.path={path}", f"record.path={record}", f"generate.tensor_parallel={ranks}"]
    wanted = generated(path, PROMPTS, outputs=OUTPUTS)
    async with Engine(load_config(None, sets=sets, environ={}).config) as engine:
        assert engine.ledger is not None
        states = sum(line.bytes for line in engine.ledger.lines if line.line == "state")
        assert states == 16 * engine.info.state_bytes, "of all slots and snapshots"
        started = [await begin(engine, prompt, f"first-{n}") for n, prompt in enumerate(PROMPTS)]
        found = await answers_over_a_kill(engine, started, engine.rank_pids[-1], tokens=60)
        assert [one.token_ids for one in found] == wanted
        counts = engine.statistics()["generate"]
        assert counts["preemptions"] > 0
        for number in (0, 1):
            again = await read(await begin(engine, PROMPTS[number], f"again-{number}"))
            assert again.token_ids == wanted[number]
        cached = engine.statistics()["generate"]["tokens_cached"] - counts["tokens_cached"]
        assert cached >= len(SHARED), "snapshots are used"
        await assert_idle(engine)
    report = replay(record)
    assert report.difference is None
    assert report.events > 50
