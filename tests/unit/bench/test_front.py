"""The benchmark server, whose ranks compute nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.bench.parts import stub_plugin
from tests.bench.parts.front import FrontLoad, front_row
from tests.unit.bench.idle_plugin import plugin as idle
from vsched.bench.load.client import Sample
from vsched.bench.load.generator import Answers, summarise
from vsched.bench.load.shapes import Case
from vsched.worker.contract import Batch


def test_costs_are_of_one_request() -> None:
    load = FrontLoad(case=Case.TEXT, output_tokens=2, clients=1, requests=4)
    samples = [
        Sample(0.0, ended=0.5, stamps=[0.1, 0.2], prompt_tokens=3, output_tokens=2, status=200)
        for _ in range(4)
    ]
    answers = Answers(sessions=[[one] for one in samples], tokens=[2] * 4, wall_s=2.0, cpu_s=0.5)
    spent = {"http": 0.04, "engine": 0.02, "ranks": 0.008}
    row = front_row(load, summarise(Case.TEXT, 1, answers), spent, processes=2)
    assert (row.processes, row.http_ms) == (2, 10.0)
    assert (row.requests_s, row.output_tokens_s) == (2.0, 4.0)
    assert (row.engine_ms, row.ranks_ms, row.client_cpu) == (5.0, 2.0, 0.25)


@pytest.mark.parametrize("step_s", [0.0, 0.25])
def test_ranks_yield_a_token_for_every_row(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(stub_plugin, "load_worker", lambda _name: idle)
    info = idle.inspect("", dtype="auto", item_tokens_max=0)
    generator = stub_plugin.StubGenerator(info, step_s=step_s)
    rows = np.zeros(3, np.int32)
    batch = Batch(
        decode_slots=rows,
        decode_tokens=rows,
        decode_positions=rows,
        decode_sequences=[],
        block_tables=rows,
        embeddings=np.zeros((0, 1, 1), np.uint8),
    )
    assert generator.step(batch).tokens.tolist() == [ord("d")] * 3
    assert slept == ([step_s] if step_s else [])
