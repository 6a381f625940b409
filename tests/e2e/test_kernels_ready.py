"""No kernel is compiled while requests are served: ranks have every kernel when they are ready.

Ranks count the kernels that they compile, and those that they read from disk, since a new machine would have to compile
them. So the tests need no empty folder to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.e2e.asking import TEXTS, Ask, begin, drawn_image, read
from tests.e2e.test_drafts import LOOKUP
from tests.patience import until
from vsched import Config, Engine, SamplingParams
from vsched.api.structured_outputs import constraint_from_schema

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.slow,
]

SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
DRAWN = replace(GREEDY, temperature=0.9, seed=3)
SAMPLINGS = (
    GREEDY,
    DRAWN,
    replace(DRAWN, top_k=5, top_p=0.9, min_p=0.01, logprobs=3),
    replace(DRAWN, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    replace(GREEDY, logit_bias=((7, 5.0), (9, -5.0)), bad_words=((11,),), min_tokens=4, logprobs=0),
    replace(GREEDY, prompt_logprobs=2),
    SamplingParams(temperature=0.8, seed=5, max_tokens=40, grammar=constraint_from_schema(SCHEMA)),
    SamplingParams(temperature=0.0, max_tokens=40, grammar=constraint_from_schema(SCHEMA)),
)
SWAPPED = ("generate.preemption.mode=swap", "generate.swap_memory=64MiB")
THREADS = ("encode.threads=2", "generate.threads=2")
WAYS: dict[str, tuple[str, ...]] = {
    "nano25 bfloat16, two threads": ("model.dtype=bfloat16", *THREADS, *SWAPPED),
    "nano25 float32, drafts": ("model.dtype=float32", LOOKUP),
    "nano25 int8, 8-bit cache, swapped": (
        *("model.dtype=bfloat16", "generate.weights=int8", "encode.weights=int8"),
        *("generate.kv_dtype=int8", *THREADS, *SWAPPED),
    ),
    "nano25 int4, blocks of 32": (
        *("model.dtype=bfloat16", "generate.weights=int4", "generate.block_size=32", *THREADS),
    ),
    "nano3 bfloat16": ("model.dtype=bfloat16", "placement=together", LOOKUP),
    "nano25 bfloat16, adapters": (
        *("model.dtype=bfloat16", *THREADS, "adapters.count_max=2", "adapters.rank_max=4"),
    ),
}
QUICK = "nano25 bfloat16, two threads"


def requests() -> Iterator[tuple[Ask, SamplingParams]]:
    """Yield each kind of sampling, for text, for a picture and for several of other sizes."""
    for number, sampling in enumerate(SAMPLINGS):
        pictures = [drawn_image(6000 + number + k, (90 + 50 * k, 60)) for k in range(number % 3)]
        yield Ask(TEXTS[number % 5] * (1 + number % 4), pictures), sampling
    yield Ask("one two three one two three " * 12), replace(GREEDY, max_tokens=60)


async def ask_all(engine: Engine, adapter: str = "") -> None:
    """Send every request, one by one and then at once, more than the KV cache can hold; probabilities are numbers."""
    for ask, sampling in requests():
        await read(await begin(engine, ask, sampling, adapter=adapter))
    started = [await begin(engine, ask, sampling) for ask, sampling in [*requests()] * 2]
    for answer in await asyncio.gather(*(read(each) for each in started)):
        assert all(-20 < one.logprob <= 0 for one in answer.logprobs)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == QUICK else pytest.mark.thorough) for way in WAYS]
)
async def test_no_request_waits_for_a_kernel(
    way: str, configure: Callable[..., Config], checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = ""
    settings = [*WAYS[way], "deadlines.heartbeat_s=0.3"]
    if "adapters" in way:
        from tests.workers.adapters.peft_adapters import AdaptedReference

        adapter = "one"
        AdaptedReference(checkpoints("nano25"), tmp_path / adapter, seed=0)
        settings += [f"adapters.directory={tmp_path}", f'adapters.load={{one = "{tmp_path}/one"}}']
    async with Engine(configure(way.split()[0], *settings)) as engine:
        await ask_all(engine, adapter)
        before = {row["name"]: row["heartbeats"] for row in engine.groups()}
        # The heartbeat in flight may have been sent before; the next one was not.
        await until(
            lambda: all(row["heartbeats"] > before[row["name"]] + 1 for row in engine.groups()),
            "each group reports its kernels",
        )
        ranks = [rank for row in engine.groups() for rank in row["ranks"]]
        assert not any(rank["kernels_late"] for rank in ranks), engine.groups()
