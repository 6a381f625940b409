"""A small model and its costs, for simulations that take milliseconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from vsched.config import LoadedConfig, load_config
from vsched.sim.cost.model import CostModel, EncodeCost, GenerateCost, HostCost
from vsched.sim.fast.metrics import SimulationOutcome
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Text, Workload, workload_of
from vsched.types import ModelInfo

TINY = ModelInfo(
    family="qwen2_5_vl",
    path="",
    dtype="bfloat16",
    hidden_size=8,
    embedding_levels=1,
    vocab_size=100,
    context_tokens=4096,
    kv_bytes_per_token=64,
    item_tokens_max=1024,
    image_token_id=6,
    stop_token_ids=(2,),
)
"""A page of embeddings is 1,024 bytes."""
COST = CostModel(
    name="test",
    source="made up",
    encode=EncodeCost(step_ns=2e6, item_ns=1e5, token_ns=4e4),
    generate=GenerateCost(step_ns=1e6, decode_ns=1e4, context_ns=10, prefill_ns=2e4, pair_ns=5),
    host=HostCost(decision_ns=1e4, request_ns=1e5, image_ns=1e5),
    bytes_per_token=192,
    shape=TINY,
    kv_tokens=4096,
)


def read_json(path: Path) -> list[SimulationOutcome]:
    return msgspec.json.decode(path.read_bytes(), type=list[SimulationOutcome])


def config(*sets: str) -> LoadedConfig:
    """Return the default configuration with some keys set, as on the command line."""
    return load_config(None, sets=sets, environ={})


def arrival(
    number: int, at_ms: float, *prompt: PromptPart, outputs: int = 4, **more: Any
) -> Arrival:
    """Return an arrival of a text of ten tokens, or of the prompt given."""
    return Arrival(
        at_ns=int(at_ms * 1e6),
        request_id=f"r{number}",
        prompt=prompt or (Text(number, 10),),
        output_tokens=outputs,
        **more,
    )


def scarce(seed: int, *, requests: int = 40) -> Workload:
    """Return requests that share texts and images, too close together for the small sizes of `SCARCE`."""
    rng = Random(seed)
    arrivals: Iterable[Arrival] = (
        arrival(
            number,
            number * 2.0,
            *[Text(rng.randrange(3), rng.randint(1, 40)) for _ in range(rng.randint(1, 2))],
            *[
                Image(f"image {index}", 10 + 30 * index)
                for index in rng.sample(range(6), rng.choice([0, 1, 1, 2]))
            ],
            Text(rng.randrange(1000), rng.randint(1, 20)),
            outputs=rng.randint(1, 60),
        )
        for number in range(requests)
    )
    return workload_of(f"scarce {seed}", arrivals)


SCARCE = (
    "generate.slots=4",
    "generate.block_size=4",
    "generate.max_batch_tokens=64",
    "generate.chunk_tokens=24",
    "generate.step_target_ms=0",
    "encode.admission.max_tokens=400",
    "encode.admission.max_items=8",
    "arena.embedding_bytes=6144",
    'generate.memory={use="pinned", tokens=480}',
)
"""Limits in which slots, blocks and pages all run out."""
