"""vLLM's scheduler without a model: random loads, with a worker whose next token is a function of request and place."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vsched.integrations.vllm.scheduler import PolicyScheduler
from vsched.testing.contracts.host import HostLoad

BLOCK = 16
STEPS_MAX = 100_000
init_none_hash(sha256)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path) -> str:
    """Write the configuration of a tiny model, without weights."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def make_engine(model: str, tables: Any, **settings: Any) -> LLM:
    """Start an engine with the scheduler of the bridge; without tables, or their file, with vLLM's own.

    A model without a tokenizer has no weights either.
    """
    if settings.get("skip_tokenizer_init"):
        settings["load_format"] = "dummy"
    if tables is not None:
        settings["scheduler_cls"] = "vsched.integrations.vllm.Scheduler"
        settings["additional_config"] = {"vsched": tables}
    return LLM(model, dtype="float32", seed=0, block_size=32, enforce_eager=True, **settings)


def core_of(llm: LLM) -> Any:
    """Shut an engine down and return its core; the garbage collector would later end the groups of the next one."""
    client: Any = llm.llm_engine.engine_core
    client.shutdown()
    return client.engine_core


def make_scheduler(
    model: str,
    tables: Mapping[str, Any] | None,
    *,
    slots: int = 8,
    tokens: int = 256,
    blocks: int = 110,
    asynchronous: bool = False,
) -> Any:
    """Create a scheduler of vLLM; with tables, one with policies."""
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, dtype="float32", seed=0, max_model_len=8192, skip_tokenizer_init=True
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=tokens,
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        additional_config={} if tables is None else {"vsched": tables},
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    stock = AsyncScheduler if asynchronous else VllmScheduler
    config.scheduler_config.async_scheduling = asynchronous
    return (stock if tables is None else PolicyScheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def make_request(name: str, prompt: Sequence[int], outputs: int, *, tenant: str = "") -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        pooling_params=None,
        sampling_params=SamplingParams(
            max_tokens=outputs, ignore_eos=True, extra_args={"tenant": tenant}
        ),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


class Run:
    """The result of a load.

    Attributes:
        tokens: Number of tokens by request.
        steps: Number of calls of `schedule()`.
        scheduled: Tokens of each step by request.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.steps = 0
        self.scheduled: list[dict[str, int]] = []


def worker(output: Any, done: Mapping[str, bool]) -> ModelRunnerOutput:
    """Return a token for each request whose known tokens are computed after this step."""
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[len(name) + 7] if done[name] else [] for name in names],
    )


def drive(scheduler: Any, load: Sequence[HostLoad], *, depth: int = 1) -> Run:
    """Run a load to its end, with `depth` steps in flight."""
    rng, run = random.Random(0), Run()
    flying: deque[tuple[Any, dict[str, bool]]] = deque()
    arrivals, idle, leave_at = deque(load), 0, dict[str, int]()
    while arrivals or scheduler.has_requests() or flying:
        while arrivals and (not scheduler.has_requests() or rng.random() < 0.5):
            one = arrivals.popleft()
            run.tokens[one.request_id] = 0
            if one.leaves_after is not None:
                leave_at[one.request_id] = run.steps + one.leaves_after
            request = make_request(one.request_id, one.prompt, one.outputs, tenant=one.tenant)
            request.priority = one.priority
            scheduler.add_request(request)
        for name in [one for one, step in leave_at.items() if step <= run.steps]:
            del leave_at[name]
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        run.steps += 1
        assert run.steps < STEPS_MAX
        scheduled = dict(output.num_scheduled_tokens)
        if scheduled:
            idle = 0
            run.scheduled.append(scheduled)
            done = {name: not scheduler.requests[name].is_prefill_chunk for name in scheduled}
            flying.append((output, done))
        else:
            idle += 1
            assert idle < STEPS_MAX, "nothing moves"
        if flying and (len(flying) >= depth or not scheduled):
            finished, done = flying.popleft()
            for group in scheduler.update_from_output(finished, worker(finished, done)).values():
                for sent in group.outputs:
                    run.tokens[sent.request_id] += len(sent.new_token_ids)
        elif not scheduled:
            empty = ModelRunnerOutput(req_ids=[], req_id_to_index={})
            scheduler.update_from_output(output, empty)
    return run
