"""The generate worker: facts, refusals and loading of any language model; sampled rows, log-probabilities, drafts."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import generated, prompts
from tests.unit.worker.test_drafts import Received, run_drafted
from tests.workers.batching.special_rows import sequence
from tests.workers.driver import (
    BLOCK_SIZE,
    BLOCKS,
    SLOTS,
    Checkpoints,
    Driver,
    Question,
    Stage,
    Stages,
    drawn_image,
    inspect,
    load_generator,
    outputs,
)
from tests.workers.edited import Copy, copy_of
from tests.workers.properties import thorough
from vsched.errors import CheckpointError, ConfigError, DeviceOutOfMemory, RequestRefused
from vsched.kernel.decisions import DraftGrant
from vsched.types import SamplingParams
from vsched.worker import generate_rank
from vsched.worker.contract import ImagePlan, SequenceState, WorkerSettings
from vsched.worker.drafts import SlotDraft
from vsched.worker.generate_rank import GenerateRank
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.backends.reference.host_memory import HostMemory
from vsched_workers.backends.reference.packed_weights import PackedLinear
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.language import _load_any
from vsched_workers.plugin import plugin


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", path)
    return path


@pytest.fixture
def edited(llama: Path, tmp_path: Path) -> Copy:
    """Return a copy with other entries in its config.json."""
    return functools.partial(copy_of, llama, tmp_path)


def test_facts_of_a_model_of_text(llama: Path) -> None:
    info = inspect(llama)
    assert (info.family, info.dtype, info.context_tokens) == ("llama", "float32", 512)
    assert info.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert not info.takes_images
    assert info.embedding_row_bytes == info.item_tokens_max == 0
    assert info.stop_token_ids == (2,)


INDEXED = {"model_type": "deepseek_v32"}


def test_unknown_model_type_stands_for_its_class(edited: Copy) -> None:
    """Of several types that share the class, the one that it is named after."""
    assert inspect(edited(model_type="nonsense")).family == "llama"


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("name", "tied"),
    [("gemma", True), ("stablelm", False), *thorough(("gemma", False), ("stablelm", True))],
)
def test_weights_in_many_files_and_heads_of_both_kinds(
    tmp_path: Path, name: str, tied: bool
) -> None:
    """As in large checkpoints, on either path: a tied head is in no file, and in memory once, also if packed."""
    make_checkpoint(name, tmp_path, tie_word_embeddings=tied)
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    stage = Stage.load(tmp_path)
    held = sum(weight.nbytes for weight in model.parameters())  # tied weights count once
    assert stage.generator.weights_bytes == held
    packed = Stage.load(tmp_path, attention="auto", dtype="bfloat16")
    assert packed.generator.weights_bytes < 0.625 * held  # half, and padding
    questions = [Question(prompt, count=6) for prompt in prompts()]
    found = outputs(Driver(stage, chunk=16).run(questions))
    assert found == generated(tmp_path, prompts(), outputs=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nonsense", "architectures": None}, "'nonsense' is not supported"),
        ({"model_type": None, "architectures": None}, "model_type is missing"),
        ({"model_type": "t5"}, "no decoder that writes text by itself"),
        ({"model_type": "qwen2_audio"}, "a part for images or sound"),
        ({"quantization_config": {"quant_method": "gptq"}}, "asks for gptq of None bits"),
        ({"layer_types": ["full_attention", "indexed_attention"] * 2}, "keep more than keys"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "kind that is not known"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer that attends"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"model_type": "mllama"}, "'mllama' has .*attend to images apart from the text"),
        ({"model_type": "florence2"}, "'florence2' has .*an encoder for text"),
        ({"model_type": "llava", "text_config": INDEXED}, "'llava' has .*indexed_attention"),
        ({"model_type": "llama4"}, "'llama4' has .*temperatures"),
        ({"model_type": "perception_lm", "image_token_id": 3}, "'perception_lm' .*package timm"),
        ({"rope_parameters": {**LONG_ROPE, "long_factor": [4.0] * 7}}, "factor .*value 7, limit 8"),
    ],
)
def test_inspect_refuses_input_that_cannot_run(
    edited: Copy, changes: dict[str, Any], message: str
) -> None:
    """Before weights are read."""
    with pytest.raises(CheckpointError, match=f"{message}.*Remedy: "):
        inspect(edited(**changes))


def test_context_ends_where_frequencies_would_change_for_a_whole_step(edited: Copy) -> None:
    assert inspect(edited(rope_parameters=LONG_ROPE)).context_tokens == 128


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, "fused"),
        ({"hidden_act": "relu"}, "generic"),
        ({"model_type": "stablelm"}, "generic"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "generic"),
    ],
)
def test_description_reports_the_path(edited: Copy, changes: dict[str, Any], path: str) -> None:
    """It depends on the configuration's structure only."""
    assert describe_checkpoint(str(edited(**changes))).path == path


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"deterministic": True}, "model.deterministic: "), ({"device": "cuda"}, "generate.device: ")],
)
def test_load_refuses_features_that_such_models_cannot(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    make_checkpoint("stablelm", tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_generator(inspect(tmp_path), **settings)


def test_remedy_of_ranks_that_share_a_decoder_by_plan_is_one_rank(tmp_path: Path) -> None:
    """It has its own path, which supports only one rank."""
    make_checkpoint("phi3", tmp_path)
    backend = Backend(WorkerSettings(), torch.float32)
    requested = WorkerSettings(ranks=2, rank=0, deterministic=True)
    message = (
        "several ranks share model_type 'phi3' .*"
        "Remedy: set it to false, or generate.tensor_parallel to 1"
    )
    with pytest.raises(ConfigError, match=message):
        _load_any(inspect(tmp_path), requested, backend, lambda *_: None)


@pytest.mark.parametrize(
    ("name", "declared", "message"),
    [
        ("stablelm", "kv_bytes_per_token", "keep 1024 bytes of a token.*states 77"),
        ("lfm2", "state_bytes", "keep 1536 bytes of a sequence.*states 77"),
    ],
)
def test_load_reports_layers_that_keep_more_than_declared(
    tmp_path: Path, name: str, declared: str, message: str
) -> None:
    """The memory ledger relies on the configuration; a rank does not even read weights if sizes differ."""
    make_checkpoint(name, tmp_path)
    wrong = msgspec.structs.replace(inspect(tmp_path), **{declared: 77})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        load_generator(wrong)


def test_states_are_declared_by_their_type(tmp_path: Path) -> None:
    make_checkpoint("lfm2", tmp_path)
    info, half = (inspect(tmp_path, dtype) for dtype in ("float32", "bfloat16"))
    assert info.state_bytes == 2 * 64 * 3 * 4, "two convolutions over three tokens"
    assert half.state_bytes == info.state_bytes // 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "windows that are not passed",
        ),
        ({"hidden_act": "swishy"}, "lacks .'swishy'"),
        ({"model_type": "qwen3", "rope_parameters": {"rope_type": "odd"}}, "lacks .'odd'"),
    ],
)
def test_load_reports_features_unknown_to_transformers_or_attention(
    edited: Copy, changes: dict[str, Any], message: str
) -> None:
    """Windows may be expressed by a mask alone, which is not built: a Llama would attend to all tokens."""
    path = edited(**changes)
    (path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    with pytest.raises(CheckpointError, match=message):
        load_generator(inspect(path))


@pytest.mark.parametrize(
    ("name", "attention", "dtype"),
    [
        ("deepseek_v3", "exact", "float32"),
        ("gemma4_text", "auto", "bfloat16"),
        ("qwen2_5_vl", "exact", "float32"),
    ],
)
def test_weights_are_memory_of_the_process_alone(
    tmp_path: Path, name: str, attention: str, dtype: str
) -> None:
    """Not a view of the file: replacing it changes nothing. Packed weights are read from the mapped file."""
    make_checkpoint(name, tmp_path)
    file = tmp_path / "model.safetensors"
    if dtype == "bfloat16":
        save_file({each: tensor.bfloat16() for each, tensor in load_file(file).items()}, file)
    worker = load_generator(inspect(tmp_path, dtype), attention=attention)
    packed = any(isinstance(each, PackedLinear) for each in worker.module.modules())
    assert packed == (attention == "auto")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    if not packed:
        assert worker.weights_bytes == sum(each.nbytes for each in worker.module.parameters())
    assert isinstance(worker.device_memory(), HostMemory)


@pytest.mark.parametrize(("name", "kinds"), [("stablelm", 1), ("deepseek_v3", 2), ("cohere2", 2)])
def test_first_layers_of_each_kind_run_and_come_back(name: str, kinds: int, tmp_path: Path) -> None:
    """A profiling run needs each kind of layer: dense, experts, sliding windows."""
    make_checkpoint(name, tmp_path)
    worker = load_generator(inspect(tmp_path), attention="exact")
    assert worker.frugal
    ran: list[int] = []
    for index, layer in enumerate(worker.module.model.layers):
        layer.mlp.register_forward_hook(lambda *_, at=index: ran.append(at))

    def layers_of_a_step() -> list[int]:
        ran.clear()
        stage = Stage(inspect(tmp_path), plugin.load_preprocessor(inspect(tmp_path)), None, worker)
        Driver(stage, chunk=8).run([Question([5, 6, 7], count=1)])
        return list(ran)

    worker.build_kv(blocks=400, block_size=4)
    with worker.first_layers(1):
        assert len(layers_of_a_step()) == kinds
    with worker.first_layers(0):
        assert layers_of_a_step() == []
    assert layers_of_a_step() == [0, 1, 2, 3]


def test_preprocessor_takes_text_and_refuses_images(llama: Path) -> None:
    front = plugin.load_preprocessor(inspect(llama))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rendered = front.render([{"role": "user", "content": parts}])
    assert rendered == "<|user|>one\ntwo<|assistant|>"
    ids = front.tokenize(rendered)
    assert front.detokenize(ids) == rendered
    assert front.expand(ids, []) == (ids, [])
    for refused in (
        lambda: front.plan_image(10, 10),
        lambda: front.expand(ids, [ImagePlan((), 1)]),
    ):
        with pytest.raises(RequestRefused, match="takes no images"):
            refused()


def mixed_questions(sampling: SamplingParams | None = None) -> list[Question]:
    """Return questions with none to three images of different sizes."""
    chosen = sampling or SamplingParams(temperature=0.0)
    return [
        Question("What is in the image?", [drawn_image(1, 90, 60)], sampling=chosen),
        Question("How many objects are there? Answer with a single word.", sampling=chosen),
        Question(
            "Compare the two images.",
            [drawn_image(2, 64, 64), drawn_image(3, 200, 70), drawn_image(4, 31, 150)],
            sampling=chosen,
        ),
        Question("", [drawn_image(5, 140, 140)], sampling=chosen),
    ]


PLAIN = SamplingParams(seed=7)
NUCLEUS = SamplingParams(seed=8, temperature=0.7, top_p=0.9, frequency_penalty=0.5)
TOP_K = SamplingParams(seed=9, top_k=20, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3)


@pytest.mark.parametrize(
    ("size", "sampling"),
    [("nano25", PLAIN), ("nano25", NUCLEUS), ("nano3", TOP_K)],
    ids=["plain", "nucleus", "top-k"],
)
def test_step_samples_the_same_alone_and_in_a_crowd(
    stages: Stages, size: str, sampling: SamplingParams
) -> None:
    """A seeded request draws the same tokens in any batch, even with preemption."""
    stage = stages(size)
    questions = mixed_questions(sampling)
    together = Driver(stage, chunk=40, seed=3).run(questions, arrivals=1, preempts=6)
    alone = [Driver(stage, chunk=1000).run([question])[0] for question in questions]
    assert outputs(together) == outputs(alone)


def test_step_reports_logprobs_for_the_rows_that_ask(stages: Stages) -> None:
    stage = stages("nano25")
    asking = SamplingParams(temperature=0.0, logprobs=3)
    questions = [mixed_questions()[1], dataclasses.replace(mixed_questions()[0], sampling=asking)]
    plain, reporting = Driver(stage, chunk=64).run(questions)
    assert plain.logprobs == []
    assert len(reporting.logprobs) == len(reporting.output)
    for token, entry in zip(reporting.output, reporting.logprobs, strict=True):
        values = [value for _, value in entry.top]
        assert entry.top[0] == (token, entry.logprob)
        assert values == sorted(values, reverse=True)
        assert sum(np.exp(values)) <= 1.0


def test_prepare_reports_out_of_memory(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are computed outside of a step, and may fail as well."""
    generator = stages("nano25").generator

    def positions(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    language = generator._language  # type: ignore[attr-defined]
    monkeypatch.setattr(generator, "_language", dataclasses.replace(language, positions=positions))
    with pytest.raises(DeviceOutOfMemory, match="preparing a request"):
        generator.prepare(sequence(SamplingParams(), [1] * 4, []))


def test_build_kv_refuses_input_that_cannot_fit(checkpoints: Checkpoints) -> None:
    """Value, limit and remedy; nothing is allocated."""
    worker = load_generator(inspect(checkpoints("nano25")))
    with pytest.raises(DeviceOutOfMemory, match=r"value \d+, limit \d+. Remedy: "):
        worker.build_kv(blocks=1 << 34, block_size=BLOCK_SIZE)


def test_load_refuses_an_unknown_kernel(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="'fastest'.*auto, exact"):
        load_generator(inspect(checkpoints("nano25")), attention="fastest")


def test_load_reports_progress_and_holds_no_vision_weights(
    checkpoints: Checkpoints, size: str
) -> None:
    info = inspect(checkpoints(size))
    received: list[tuple[str, float]] = []
    worker = plugin.load_generator(
        info, WorkerSettings(), lambda label, fraction: received.append((label, fraction))
    )
    fractions = [fraction for _, fraction in received]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    names = [name for name, _ in worker.module.named_parameters()]  # type: ignore[attr-defined]
    assert not any("visual" in name or "merger" in name for name in names)


CONTEXT = 96
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], list(range(10, 40)), [9, 9, 9, 4]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, ignore_eos=True),
    SamplingParams(
        temperature=1.1,
        top_p=0.9,
        seed=5,
        max_tokens=40,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        min_tokens=6,
        bad_words=((11, 12), (13,)),
        logprobs=0,
    ),
    SamplingParams(temperature=0.8, top_k=40, min_p=0.01, seed=6, max_tokens=33),
]
DECODERS = [(name, "auto") for name in ("llama", "stablelm", "gemma3_text", "mixtral")]
"""A decoder-only model, one on the generic path, one with sliding windows, one with experts."""


class Oracle:
    """Drafts the actual next tokens, with random errors, so that drafts are rejected at every position."""

    def __init__(self, answers: list[Received]) -> None:
        self._answers = answers
        self._rng = random.Random(7)

    def draft(
        self, sequence: SequenceState, length: int, grant: DraftGrant, room: int
    ) -> SlotDraft | None:
        answer = self._answers[sequence.number - 1].tokens
        done = length - sequence.prompt_length
        coming = answer[done : done + min(grant.tokens, room)]
        tokens = [one if self._rng.random() < 0.8 else one ^ 1 for one in coming]
        return SlotDraft(tokens) if tokens else None


def rank_of(stage: Stage) -> GenerateRank:
    embeddings = np.zeros((1, 1, 1), np.uint8)
    return GenerateRank(
        stage.generator, embeddings, slots=SLOTS, context_tokens=CONTEXT, block_size=BLOCK_SIZE
    )


def blocks_of(slot: int) -> list[int]:
    count = CONTEXT // BLOCK_SIZE
    shuffled = random.Random(slot).sample(range(BLOCKS), BLOCKS)
    taken = sorted(shuffled, key=lambda block: (block % 3 != slot, shuffled.index(block)))
    return taken[:count]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), [("nano25", "exact"), ("nano3", "auto"), *DECODERS])
def test_drafts_give_the_tokens_of_single_rows(
    stages: Stages, tmp_path: Path, name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("nano"):
        stage = stages(name, attention)
    else:
        make_checkpoint(name, tmp_path)
        stage = Stage.load(tmp_path, attention=attention)
    plain, _ = run_drafted(rank_of(stage), PROMPTS, PARAMS, None, blocks=blocks_of)
    monkeypatch.setattr(generate_rank, "draft", Oracle(plain).draft)
    rng = random.Random(1)
    found, drafted = run_drafted(rank_of(stage), PROMPTS, PARAMS, rng, blocks=blocks_of)
    assert [(one.tokens, one.reason) for one in found] == [
        (one.tokens, one.reason) for one in plain
    ]
    for one, other in zip(found, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    right = sum(len(one.tokens) for one in drafted)
    assert right > 20
    assert sum(one.drafts > len(one.tokens) for one in drafted) > 5, "drafts that prove wrong"


def test_plugin_verifies_no_drafts_on_a_gpu_or_with_a_state(checkpoints: Checkpoints) -> None:
    info = inspect(checkpoints("nano25"))
    assert plugin.verifies_drafts(info, device="cpu")
    assert not plugin.verifies_drafts(info, device="cuda:0")
    keeps = msgspec.structs.replace(info, state_bytes=64)
    assert not plugin.verifies_drafts(keeps, device="cpu")
