"""Models on the generic path: properties, refusals, and loading."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import generated, prompts
from tests.workers.driver import Driver, Question, Stage, inspect, load_generator
from tests.workers.edited import Copy, copy_of
from tests.workers.properties import thorough
from vsched.errors import CheckpointError, ConfigError, RequestRefused
from vsched.worker.contract import ImagePlan, WorkerSettings
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


@pytest.fixture(scope="module")
def generic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model without a decoder description: its norms have a mean and a bias."""
    path = tmp_path_factory.mktemp("stablelm")
    make_checkpoint("stablelm", path)
    return path


@pytest.fixture
def edited(llama: Path, tmp_path: Path) -> Copy:
    """Return a copy with other entries in its config.json."""
    return functools.partial(copy_of, llama, tmp_path)


def load(path: Path, **settings: Any) -> Any:
    return load_generator(inspect(path), WorkerSettings(**settings))


PROJECTION = "model.layers.1.mlp.up_proj.weight"


def test_facts_of_a_model_of_text(llama: Path) -> None:
    info = inspect(llama)
    assert (info.family, info.dtype, info.context_tokens) == ("llama", "float32", 512)
    assert info.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert not info.takes_images
    assert info.embedding_row_bytes == info.item_tokens_max == 0
    assert info.stop_token_ids == (2,)


def test_unknown_model_type_stands_for_its_class(edited: Copy) -> None:
    """Of several types that share the class, the one that it is named after."""
    assert inspect(edited(model_type="nonsense")).family == "llama"


@pytest.mark.parametrize(
    ("name", "tied"),
    [("llama", True), ("stablelm", False), *thorough(("llama", False), ("stablelm", True))],
)
def test_weights_in_many_files_and_heads_of_both_kinds(
    tmp_path: Path, name: str, tied: bool
) -> None:
    """As in large checkpoints, on either path: a tied head is in no file, and in memory once."""
    make_checkpoint(name, tmp_path, tie_word_embeddings=tied)
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    stage = Stage.load(tmp_path, attention="exact", dtype="auto")
    held = sum(weight.nbytes for weight in model.parameters())  # tied weights count once
    assert stage.generator.weights_bytes == held
    questions = [Question(prompt, count=6) for prompt in prompts()]
    found = [each.output for each in Driver(stage, chunk=16).run(questions)]
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
    ],
)
def test_inspect_refuses_input_that_cannot_run(
    edited: Copy, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{message}.*Remedy: "):
        inspect(edited(**changes))


def test_context_ends_where_frequencies_would_change_for_a_whole_step(
    edited: Copy,
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }
    assert inspect(edited(rope_parameters=rope)).context_tokens == 128


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
    generic: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(generic, **settings)


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
    ("changes", "message"),
    [
        ({PROJECTION: None}, f"{PROJECTION} is in none.*Remedy: "),
        ({PROJECTION: torch.zeros(3, 64)}, f"{PROJECTION} has another shape.*Remedy: "),
        (None, "cannot be read.*Remedy: "),
    ],
)
def test_load_reports_tensors_that_transformers_would_fill_with_random_values(
    generic: Path, tmp_path: Path, changes: dict[str, Any] | None, message: str
) -> None:
    path = copy_of(generic, tmp_path)
    file = path / "model.safetensors"
    if changes is None:
        file.write_bytes(b"no tensors at all")
    else:
        tensors = load_file(file) | changes
        stated = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(stated, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("name", "declared", "message"),
    [
        ("stablelm", "kv_bytes_per_token", "keep 1024 bytes of a token.*tells 77"),
        ("lfm2", "state_bytes", "keep 1536 bytes of a sequence.*tells 77"),
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


def test_load_reports_windows_unknown_to_attention(edited: Copy) -> None:
    """They may be expressed by a mask alone, which is not built: a Llama would attend to all tokens."""
    path = edited(layer_types=["full_attention", "sliding_attention"] * 2)
    (path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    with pytest.raises(CheckpointError, match="windows that are not passed to the attention"):
        load(path)


@pytest.mark.parametrize(
    ("name", "attention", "dtype"),
    [
        ("stablelm", "exact", "float32"),
        ("stablelm", "auto", "bfloat16"),
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
    worker = load_generator(inspect(tmp_path, dtype), WorkerSettings(attention=attention))
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
    worker = load(tmp_path, attention="exact")
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
