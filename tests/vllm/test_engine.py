"""Complete engines: the same tokens as vLLM with each policy, also with too few KV blocks, images, and a step ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from PIL import Image
from vllm import SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from tests.vllm.driving import core_of, make_engine, write_model
from tests.vllm.test_scheduler import BAD, FAIR, LAST, SHORTEST
from vsched.sim.cost.host_runs import read_run, run_file
from vsched.sim.workload.traces import load_trace
from vsched_workers.checkpoint.random_init import make_checkpoint

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
Prompts = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Run the engine in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


def texts() -> Prompts:
    """Return prompts of 10 to 300 tokens."""
    rng = random.Random(3)
    lengths = [rng.choice([10, 30, 100, 300]) for _ in range(24)]
    return [
        {"prompt_token_ids": [rng.randrange(10, 4000) for _ in range(length)]} for length in lengths
    ]


def pictures() -> Prompts:
    """Return prompts with none, one or two of five pictures, between words."""
    rng, found = random.Random(5), []
    sizes = [(112, 84 + 28 * number) for number in range(5)]
    made = [Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])) for size in sizes]
    for number in range(14):
        chosen = [made[rng.randrange(5)] for _ in range(number % 3)]
        words = [" ".join(["return value"] * rng.randrange(3, 40)) for _ in (0, *chosen)]
        prompt = {"prompt": IMAGE.join(words)}
        found.append({**prompt, "multi_modal_data": {"image": chosen}} if chosen else prompt)
    return found


def generate(
    model: str,
    prompts: Prompts,
    tables: Mapping[str, Any] | None,
    *,
    outputs: int,
    repetition_penalty: float = 1.0,
    **settings: Any,
) -> tuple[list[list[int]], Any]:
    """Return the tokens, and the engine; without tables, it is vLLM's own."""
    sizes = {"max_model_len": 640, "max_num_seqs": 6, "max_num_batched_tokens": 128}
    sizes |= {"num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    llm = make_engine(model, tables, **sizes, **settings)
    sampling = SamplingParams(
        temperature=0,
        repetition_penalty=repetition_penalty,
        max_tokens=outputs,
        ignore_eos=True,
        detokenize=False,
    )
    done = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in done], core_of(llm)


def check_engine(engine: Any, tables: Sequence[str]) -> None:
    """Check that the policies of these tables were called, and that the bridge did not fail."""
    figures = engine.scheduler.host.figures()
    assert engine.scheduler.host.faults == {}
    assert not engine.scheduler.requests
    for table in tables:
        assert figures["policy_calls"][table]["calls"] > 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def wanted(model: str) -> list[list[int]]:
    """The tokens of stock vLLM."""
    tokens, _ = generate(model, texts(), None, outputs=120, skip_tokenizer_init=True)
    assert len({tuple(one) for one in tokens}) > 12
    return tokens


@pytest.mark.parametrize(
    ("tables", "ahead"),
    [(SHORTEST, False), (FAIR, False), (LAST, False), (BAD, False), (FAIR, True), (BAD, True)],
    ids=["shortest", "fair", "last", "bad", "fair, a step ahead", "bad, a step ahead"],
)
def test_tokens_are_those_of_vllm_with_few_blocks(
    model: str,
    wanted: list[list[int]],
    tables: Mapping[str, Any],
    ahead: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if ahead:
        plan_ahead(monkeypatch)
    trace = tmp_path / "run.jsonl"
    tables = {**tables, "vllm": {"trace": str(trace)}}
    tokens, engine = generate(model, texts(), tables, outputs=120, skip_tokenizer_init=True)
    assert tokens == wanted
    check_engine(engine, ["generate.admission", "generate.preemption"])
    assert engine.batch_queue_size == read_run(run_file(trace)).header.depth == 1 + ahead
    arrivals = list(load_trace(trace))
    lengths = [len(one["prompt_token_ids"]) for one in texts()]
    assert [one.prompt_tokens for one in arrivals] == lengths
    assert {one.output_tokens for one in arrivals} == {120}


def plan_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine schedule asynchronously on a CPU, for which vLLM switches it off; its worker stays synchronous."""
    configure, create = CpuPlatform.check_and_update_config, CPUModelRunner.__init__

    def configured(cls: type, vllm_config: Any) -> None:
        del cls
        configure(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    def created(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.use_async_scheduling = False

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(configured))
    monkeypatch.setattr(CPUModelRunner, "__init__", created)


def test_tokens_are_those_of_vllm_with_images(tmp_path: Path) -> None:
    model, trace = str(tmp_path / "model"), tmp_path / "run.jsonl"
    make_checkpoint(model, "tiny25")
    tables = {
        **FAIR,
        "encode": {"eviction": {"use": "vsched_policies.eviction:S3Fifo"}},
        "vllm": {"trace": str(trace)},
    }
    cache = "vsched.integrations.vllm.EmbeddingCache"
    # Without the penalty, a random model with tied embeddings would repeat the last token.
    few: dict[str, Any] = {"outputs": 24, "repetition_penalty": 100.0}
    few["limit_mm_per_prompt"] = {"image": 2, "video": 0}
    stock, _ = generate(model, pictures(), None, **few)
    assert len({tuple(one) for one in stock}) > 10
    tokens, engine = generate(
        model, pictures(), tables, ec_manager_config={"encoder_cache_manager_cls": cache}, **few
    )
    assert tokens == stock
    check_engine(engine, ["generate.admission", "generate.step"])
    arrivals = list(load_trace(trace))
    assert [len(one.images) for one in arrivals] == [number % 3 for number in range(14)]
    run = read_run(run_file(trace))
    assert run.header.depth == 1
    different = {image.key for one in arrivals for image in one.images}
    assert sum(one.images for one in run.steps) >= len(different) > 3
