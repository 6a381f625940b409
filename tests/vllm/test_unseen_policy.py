"""A policy outside vsched makes the same decisions inside vLLM as in our server, from one configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from tests.unseen_policy import (
    BLOCK_TOKENS,
    KV_TOKENS,
    LOAD,
    SEATS,
    STEP_TOKENS,
    check_orders,
    configurations,
    prompt_of,
)
from tests.vllm.driving import core_of, make_engine, write_model


def serve(model: str, tables: Path | None, slots: int) -> tuple[dict[str, list[int]], Any]:
    """Return the tokens of the requests, in the order of first tokens, and the scheduler."""
    llm = make_engine(
        model,
        str(tables) if tables else None,
        skip_tokenizer_init=True,
        max_model_len=KV_TOKENS,
        max_num_seqs=slots,
        max_num_batched_tokens=STEP_TOKENS,
        num_gpu_blocks_override=KV_TOKENS // BLOCK_TOKENS + 1,
    )
    engine = llm.llm_engine
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    for number, ask in enumerate(LOAD):
        more: Any = {"max_tokens": ask.outputs, "extra_args": {"tenant": ask.tenant}}
        prompt: Any = {"prompt_token_ids": prompt_of(number, ask.prompt)}
        engine.add_request(ask.name, prompt, SamplingParams(**greedy, **more))
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for one in engine.step():
            if ids := list(one.outputs[0].token_ids):
                tokens[one.request_id] = ids
    return tokens, core_of(llm).scheduler


def test_unseen_policy_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = write_model(tmp_path)
    wanted, _ = serve(model, None, 4)
    assert len({tuple(one) for one in wanted.values()}) > len(LOAD) // 2
    orders = {}
    for name, tables in configurations(tmp_path).items():
        tokens, scheduler = serve(model, tables, 1 if name == "alone" else 4)
        assert tokens == wanted
        orders[name] = list(tokens)
        figures = scheduler.host.figures()
        assert not figures["policy_faults"]
        assert scheduler.host.faults == {}
        if name == "turns":
            assert {seat for seat, one in figures["policy_calls"].items() if one["calls"]} == SEATS
    check_orders(orders)
