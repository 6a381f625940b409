"""Whole engines: the same tokens as vLLM for each order of policies, also with too few KV blocks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import LLM, SamplingParams

from tests.vllm.driving import write_model
from tests.vllm.test_scheduler import BAD, FAIR, LAST, SHORTEST
from vsched.sim.workload.traces import load_trace


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    lengths = [rng.choice([10, 30, 100, 300]) for _ in range(24)]
    return [[rng.randrange(10, 4000) for _ in range(length)] for length in lengths]


def generate(model: str, tables: Mapping[str, Any] | None) -> tuple[list[list[int]], Any]:
    more: dict[str, Any] = {}
    if tables is not None:
        more = {
            "scheduler_cls": "vsched.integrations.vllm.Scheduler",
            "additional_config": {"vsched": tables},
        }
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        seed=0,
        max_model_len=640,
        max_num_seqs=6,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=24,
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=True,
        **more,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": one} for one in prompts()],
        SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    core = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    core.shutdown()  # the garbage collector would do it later, and end the next engine's groups
    return [list(one.outputs[0].token_ids) for one in outputs], scheduler


def test_tokens_are_those_of_vllm_with_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = write_model(tmp_path)
    wanted, _ = generate(model, None)
    assert len({tuple(one) for one in wanted}) > 12
    for name, tables in (("shortest", SHORTEST), ("fair", FAIR), ("last", LAST), ("bad", BAD)):
        trace = tmp_path / f"{name}.jsonl"
        tokens, scheduler = generate(model, {**tables, "vllm": {"trace": str(trace)}})
        arrivals = list(load_trace(trace))
        assert [one.prompt_tokens for one in arrivals] == [len(one) for one in prompts()]
        assert {one.output_tokens for one in arrivals} == {120}
        assert tokens == wanted
        assert scheduler.host.faults == {}
        assert scheduler.host.figures()["policy_calls"]["generate.admission"]["calls"] > 0
        assert scheduler.host.figures()["policy_calls"]["generate.preemption"]["calls"] > 0
