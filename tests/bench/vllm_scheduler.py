"""Cost of vLLM's scheduler without a model; runs in vLLM's environment: `python vllm_scheduler.py CKPT OUT STEPS`.

A step is `schedule` and `update_from_output`, with a worker's output of one token per request in
between, which is not timed. The timing is the thread's CPU time, since a step of 10 ms is
interrupted on a busy machine, one of 20 µs hardly ever. The cases are those of `vsched bench
kernel`: steady decode of running requests, and a request with one image from arrival to end; and
the arrival alone, including hashing, of a request with eight images and 2,300 tokens.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import (  # type: ignore[import-not-found,unused-ignore]
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.multimodal.inputs import (  # type: ignore[import-not-found,unused-ignore]
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found,unused-ignore]
from vllm.utils.hashing import sha256  # type: ignore[import-not-found,unused-ignore]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found,unused-ignore]
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import (  # type: ignore[import-not-found,unused-ignore]
    Scheduler,
)
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found,unused-ignore]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found,unused-ignore]
from vllm.v1.request import Request  # type: ignore[import-not-found,unused-ignore]
from vllm.v1.structured_output import (  # type: ignore[import-not-found,unused-ignore]
    StructuredOutputManager,
)

BLOCK = 16
PROMPT_TOKENS = 128
IMAGE_TOKENS = 256
RUNNING = (1, 64, 256, 1024)
Row = dict[str, Any]


def make_scheduler(checkpoint: str, slots: int, budget: int, blocks: int) -> Any:
    """Return a scheduler configured as in the server, including prefix caching and statistics."""
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=ModelConfig(model=checkpoint, dtype="bfloat16", seed=0, max_model_len=8192),
        scheduler_config=SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
            is_multimodal_model=True,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def make_request(name: str, tokens: list[int], max_tokens: int, images: list[Any]) -> Any:
    """Return a request with blocks hashed as in the server."""
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        mm_features=images or None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def make_image(name: str, offset: int) -> Any:
    """Return an image placeholder with a name."""
    place = PlaceholderRange(offset=offset, length=IMAGE_TOKENS)
    dummy = MultiModalKwargsItem.dummy()
    return MultiModalFeatureSpec(data=dummy, mm_position=place, identifier=name, modality="image")


def step(scheduler: Any) -> int:
    """Run a step; return the nanoseconds of the scheduler alone."""
    began = time.thread_time_ns()
    output = scheduler.schedule()
    scheduled = time.thread_time_ns()
    names = list(output.num_scheduled_tokens)
    sampled = []
    for name in names:
        request = scheduler.requests[name]
        done = request.num_computed_tokens >= request.num_prompt_tokens
        sampled.append([7] if done else [])
    places = {name: index for index, name in enumerate(names)}
    answer = ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
    answered = time.thread_time_ns()
    scheduler.update_from_output(output, answer)
    return scheduled - began + time.thread_time_ns() - answered


def row(case: str, running: int, spent_ns: list[int]) -> Row:
    """Return the output row of a case."""
    values = sorted(value / 1e3 for value in spent_ns)
    return {
        "case": case,
        "running": running,
        "p50_us": round(values[len(values) // 2], 2),
        "p99_us": round(values[int(len(values) * 0.99)], 2),
    }


def decode(checkpoint: str, running: int, steps: int) -> Row:
    """Measure steady decode steps."""
    blocks = running * 80 + 100
    scheduler = make_scheduler(checkpoint, running, max(2048, running * 160), blocks)
    rng = random.Random(running)
    for index in range(running):
        tokens = [rng.randrange(10, 4000) for _ in range(PROMPT_TOKENS + index % 16)]
        scheduler.add_request(make_request(f"r{index}", tokens, 1000, []))
    for _ in range(5):
        step(scheduler)
    assert len(scheduler.running) == running
    gc.collect()
    gc.disable()
    spent = [step(scheduler) for _ in range(steps)]
    gc.enable()
    return row("decode step", running, spent)


def arrive(checkpoint: str, requests: int) -> list[Row]:
    """Measure requests with one image to their end, and the arrival of requests with eight."""
    scheduler = make_scheduler(checkpoint, 64, 8192, 20_000)
    rng = random.Random(0)
    whole: list[int] = []
    gc.collect()
    gc.disable()  # as in `python -m tests.bench.parts kernel`
    for index in range(requests):
        tokens = [rng.randrange(10, 4000) for _ in range(PROMPT_TOKENS)]
        tokens[8:8] = [5] * IMAGE_TOKENS
        began = time.thread_time_ns()
        request = make_request(f"a{index}", tokens, 1, [make_image(f"i{index}", 8)])
        scheduler.add_request(request)
        spent = time.thread_time_ns() - began
        while scheduler.requests:
            spent += step(scheduler)
        whole.append(spent)
    many: list[int] = []
    for index in range(requests):
        tokens, images = [], []
        for place in range(8):
            tokens += [rng.randrange(10, 4000) for _ in range(31)]
            images.append(make_image(f"e{index}-{place}", len(tokens)))
            tokens += [5] * IMAGE_TOKENS
        began = time.thread_time_ns()
        scheduler.add_request(make_request(f"e{index}", tokens, 1, images))
        many.append(time.thread_time_ns() - began)
        while scheduler.requests:
            step(scheduler)
    gc.enable()
    return [row("one-image request", 0, whole), row("arrival of 8 images, 2,300 tokens", 0, many)]


def main() -> None:
    """Measure everything and write it."""
    checkpoint, out, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    init_none_hash(sha256)
    rows = [decode(checkpoint, running, steps) for running in RUNNING]
    rows += arrive(checkpoint, steps)
    out.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
