"""Conversion of a GGUF file: the same weights, the same tokens, all or nothing."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import nn

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import library_model
from tests.workers.backends.cpu.twins import WITHIN, run_both
from tests.workers.checkpoint.gguf_files import add_sizes, add_tokenizer, write_to_file
from tests.workers.driver import Question, Stage, inspect
from vsched.checkpoints import with_local_checkpoints
from vsched.config import load_config
from vsched.errors import CheckpointError
from vsched_workers.checkpoint import files
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.checkpoint.gguf import (
    _mend_rope,
    _mend_scores,
    check_conversion,
    convert_gguf,
    convert_in_child,
)
from vsched_workers.checkpoint.gguf_blocks import packed_weights, quantized_weight
from vsched_workers.checkpoint.gguf_weights import FileWeight
from vsched_workers.checkpoint.random_init import SMALL_TEXT, learnt_tokenizer
from vsched_workers.plugin import TransformersPlugin
from vsched_workers.quantized.published import read_quantized
from vsched_workers.quantized.schemes import scheme_of

gguf: Any = pytest.importorskip("gguf")

LAYERS = 2
ROPE = {"rope_type": "default", "rope_theta": 100000.0}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
TEXTS = [
    "The red square.",
    "In 1234 there were  56.",
    " two  spaces\n\nand naïve café",
    "<|im_start|>user\nhi",
]
QUANTISED = {
    "blk.0.ffn_down.weight": "Q4_1",
    "blk.0.attn_q.weight": "Q4_0",
    "blk.0.attn_v.weight": "Q8_0",
    "blk.1.attn_k.weight": "Q5_0",
    "blk.0.ffn_gate_exps.weight": "Q4_0",
    "blk.0.ffn_up_exps.weight": "Q8_0",
    "blk.0.ffn_down_exps.weight": "Q4_0",
    "blk.1.ffn_gate_exps.weight": "Q4_1",
    "blk.1.ffn_up_exps.weight": "Q4_0",
    "blk.1.ffn_down_exps.weight": "Q5_0",
}

ROUNDED = ("0.mlp.down", "0.self_attn.q", "0.self_attn.v", "1.self_attn.k")
"""The layers in question, by their names in transformers."""

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer with the pre-tokenizer of SmolLM."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    texts = [SMALL_TEXT, "is  12" * 50]  # spaces before a digit are a word of their own
    pieces: Any = pre_tokenizers.Sequence([digits, words])
    return learnt_tokenizer(texts, pieces, words=384, longest=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("llama")
    sizes = {"vocab_size": 384, "num_hidden_layers": LAYERS, "tie_word_embeddings": True}
    make_checkpoint("llama", path, rope_parameters=ROPE, initializer_range=0.05, **sizes)
    return library_model(path)


def permuted(weight: Any, heads: int) -> Any:
    """Return the rows of a projection in llama.cpp's order."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape)


def gguf_tensors(model: Any) -> dict[str, Any]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    config, tensors = model.config, {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.model.state_dict(prefix="model.").items():
        weight, part = value.numpy(), name.split(".")[-2]
        if part in heads:
            weight = permuted(weight, heads[part])
        tensors[names.get_name(name, (".weight",))] = weight
    return tensors


@pytest.fixture
def make(tmp_path: Path, model: Any, tokenizer: Any) -> Make:
    """Write a GGUF file of the model with some tensors quantized; `pre` names the pre-tokenizer.

    `without` is a part of the names of tensors to leave out; `rope` has entries and tensors that scale the rotary
    embedding; `end` is the EOS token; `split` the tensors in each part of the file, after one without tensors.
    """

    def write(
        pre: str = "smollm",
        without: str = "no tensor",
        rope: Mapping[str, Any] = MappingProxyType({}),
        end: str = "<|im_end|>",
        split: int = 0,
    ) -> Path:
        path = tmp_path / "source" / "tiny.gguf"
        path.parent.mkdir()
        writer = gguf.GGUFWriter(
            path, "llama", split_max_tensors=split, small_first_shard=split > 0
        )
        writer.add_name("tiny")
        add_sizes(writer, model.config, context=512)
        writer.add_vocab_size(384)
        for name, value in rope.items():
            if isinstance(value, np.ndarray):
                writer.add_tensor(name, value)
            else:
                adds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
                adds[type(value)](f"llama.rope.scaling.{name}", value)
        add_tokenizer(writer, tokenizer, pre=pre, end=end)
        writer.add_chat_template(TEMPLATE)
        tensors = gguf_tensors(model)
        add_tensors(writer, {name: tensors[name] for name in tensors if without not in name})
        return min(path.parent.iterdir())

    return write


def add_tensors(writer: Any, tensors: Mapping[str, Any]) -> None:
    """Write tensors, some quantized, and close the file."""
    for name, value in tensors.items():
        if name in QUANTISED:
            kind = gguf.GGMLQuantizationType[QUANTISED[name]]
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    write_to_file(writer)


def write_mixture(path: Path, model: Any, tokenizer: Any) -> None:
    """Write the GGUF file of a Qwen3-MoE; its experts have three tensors, and four formats in two layers."""
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, LAYERS)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_name("tiny")
    add_sizes(writer, config, context=512)
    writer.add_key_length(config.head_dim)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    add_tokenizer(writer, tokenizer, pre="smollm", end="<|im_end|>")
    tensors = {}
    for name, value in model.state_dict().items():
        layer, _, part = name.rpartition(".")
        each = {f"{layer}.{part}": value.numpy()}
        if part == "gate_up_proj":
            gate, up = np.split(value.numpy(), 2, 1)
            each = {f"{layer}.gate_proj": gate, f"{layer}.up_proj": up}
        for full, array in each.items():
            tensors[f"{names.get_name(full.removesuffix('.weight'))}.weight"] = array
    add_tensors(writer, tensors)


def convert(file: Path, path: Path, dtype: str = "float32") -> int:
    return convert_gguf(str(file), str(path), dtype=dtype, progress=lambda _what, _fraction: None)


def test_gguf_file_in_place_of_a_folder_is_converted_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a link, as those of the hub are to files named by a hash."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, link = tmp_path / "0123abcd", tmp_path / "linked.gguf"
    make().rename(file)
    link.symlink_to(file)
    config = load_config(None, sets=[f"model.path={link}"], environ={}).config
    local = with_local_checkpoints(config)
    assert local.model.served_name == "linked"
    folder = Path(local.model.path)
    assert folder.is_relative_to(tmp_path / "cache")
    assert inspect(folder).family == "llama"
    written_ns = (folder / "model.safetensors").stat().st_mtime_ns
    assert with_local_checkpoints(config) == local
    assert (folder / "model.safetensors").stat().st_mtime_ns == written_ns
    file.write_bytes(file.read_bytes() + b"0")
    assert with_local_checkpoints(config) != local, "another file of this name gets its own folder"


def test_gguf_file_that_another_server_has_converted_meanwhile_is_served(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers that start with the same new file both convert it; the second one finds the first one's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load_config(None, sets=[f"model.path={make()}"], environ={}).config
    real = TransformersPlugin.convert_gguf
    folders: list[str] = []

    def both(self: TransformersPlugin, file: str, path: str, **options: Any) -> int:
        real(self, file, path, **options)
        folders.append(path)
        return real(self, file, path, **options)

    monkeypatch.setattr(TransformersPlugin, "convert_gguf", both)
    assert [with_local_checkpoints(config).model.path] == folders


@pytest.mark.slow
def test_convert_gguf_keeps_weights_tokens_and_template(
    make: Make, tmp_path: Path, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in files of limited size, and from a file in several parts, any of which may be given."""
    path, part = tmp_path / "made", make(split=8)
    assert part.name == "tiny-00001-of-00004.gguf"
    monkeypatch.setattr(files, "SHARD_BYTES_MAX", 200_000)
    parameters = convert(part.with_name("tiny-00003-of-00004.gguf"), path)
    sizes = [each.stat().st_size for each in path.glob("model-*-of-*.safetensors")]
    assert len(sizes) == 2
    assert max(sizes) < 220_000
    assert parameters == sum(value.numel() for value in model.parameters())
    library: Any = transformers
    made = library.AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True)
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    assert made.config.rope_parameters["rope_theta"] == pytest.approx(100000.0)
    wanted, found = model.state_dict(), made.state_dict()
    assert found.keys() == wanted.keys()
    rounded = {name for name, value in wanted.items() if not torch.equal(found[name], value)}
    assert rounded == {f"model.layers.{name}_proj.weight" for name in ROUNDED}
    for name in rounded:
        assert torch.allclose(found[name], wanted[name], rtol=0, atol=0.02), name
    read = library.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    for text in TEXTS:
        assert read(text).input_ids == tokenizer(text).input_ids
        assert read.decode(read(text).input_ids) == text
    assert read.chat_template == TEMPLATE
    assert made.generation_config.eos_token_id == [tokenizer.eos_token_id] == [read.eos_token_id]


@pytest.mark.slow
def test_convert_gguf_keeps_quantized_layers_and_serves_them(make: Make, tmp_path: Path) -> None:
    """Rows of queries are in another order in the file; one layer's queries have 4 bits and its values 8."""
    file, kept, plain = make(), tmp_path / "kept", tmp_path / "plain"
    assert convert(file, kept, "auto") == convert(file, plain)
    scheme = scheme_of(json.loads((kept / "config.json").read_text()))
    assert scheme is not None
    tensors, wanted = (load_file(path / "model.safetensors") for path in (kept, plain))
    values = [name for name in tensors if name.endswith("_values")]
    assert {*values} == {f"model.layers.{name}_proj.weight_values" for name in ROUNDED}
    assert {str(tensors[name].dtype) for name in values} == {"torch.uint8", "torch.int8"}
    for name in values:
        layer, weight = name.removesuffix("weight_values"), wanted[name.removesuffix("_values")]
        shape = (weight.shape[0], weight.shape[1])
        layers = {end.removeprefix(layer): each for end, each in tensors.items()}
        found = read_quantized(scheme, layers.get, shape, torch.bfloat16, name="")
        assert (found.dequantized() - weight).norm() < 0.008 * weight.norm()
    served = Stage.load(kept, attention="auto", dtype="bfloat16")
    questions = [Question(range(3, 3 + length), count=8) for length in (5, 40)]
    twin = Stage.load(plain, attention="auto")
    assert run_both(served, twin, questions, arrivals=2).apart < WITHIN
    described = describe_checkpoint(str(kept))
    assert described.parameters == describe_checkpoint(str(plain)).parameters
    assert {"int4", "int8", "bfloat16"} <= described.dtypes.keys()
    held = described.weights_bytes["language"]["auto"]
    assert held == pytest.approx(served.generator.weights_bytes, rel=0.2)


@pytest.mark.slow
def test_experts_keep_the_quantization_of_the_file(tmp_path: Path, tokenizer: Any) -> None:
    """Two formats in one parameter of the model, or one of more than 4 bits, become int8."""
    sizes = {"vocab_size": 384, "num_hidden_layers": LAYERS, "initializer_range": 0.1}
    make_checkpoint("qwen3_moe", tmp_path / "source", rope_parameters=ROPE, **sizes)
    model = library_model(tmp_path / "source")
    write_mixture(file := tmp_path / "mixture.gguf", model, tokenizer)
    assert convert(file, tmp_path / "kept", "auto") == convert(file, tmp_path / "plain")
    kept, plain = (load_file(tmp_path / each / "model.safetensors") for each in ("kept", "plain"))
    experts = "model.layers.{}.mlp.experts.{}_proj"
    for layer, part, dtype in (
        (0, "gate_up", torch.int8),
        (0, "down", torch.uint8),
        (1, "gate_up", torch.uint8),
        (1, "down", torch.int8),
    ):
        name = experts.format(layer, part)
        assert kept[f"{name}_values"].dtype == dtype
        assert kept[f"{name}_values"].shape[:2] == plain[name].shape[:2]
        error = (plain[name] - model.state_dict()[name]).norm() / plain[name].norm()
        assert error < 0.12, "experts are in the order of the model"
    served, twin = (Stage.load(tmp_path / each, attention="auto") for each in ("kept", "plain"))
    questions = [Question(range(3, 3 + length), count=8) for length in (5, 40)]
    # Head and embedding, which are int8, have 64 inputs only.
    assert run_both(served, twin, questions, arrivals=2).apart < 2 * WITHIN


def drawn_blocks(kind: Any, rows: int) -> Any:
    """Return random blocks [rows, bytes] with finite scales, which are float16 in the formats tested."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, 3, size), dtype=np.uint8)
    for place in SCALES_AT[kind.name]:
        scales = np.random.default_rng(1).uniform(0.001, 0.02, (rows, 3, 1)).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


SCALES_AT = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q4_K": [0, 2],
    "Q3_K": [108],
    "Q2_K": [80, 82],
    "Q6_K": [208],
    "Q5_K": [0, 2],
    "IQ4_XS": [0],
}
"""Offsets of float16 numbers in a block."""


def weight_of(blocks: Any, kind: Any, arrange: Callable[[Any], Any]) -> FileWeight:
    """Return a weight of 24 outputs from blocks of a kind, which transformers would rearrange."""
    shape = gguf.quant_shape_from_byte_shape(blocks.shape, kind)
    tensor = types.SimpleNamespace(data=blocks, tensor_type=kind, name="blk", shape=shape[::-1])
    rules: Any = types.SimpleNamespace(arrange=lambda _, tensors: arrange(tensors["blk"]))
    target = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return FileWeight("layer.weight", target, [tensor], rules)


@pytest.mark.parametrize("name", SCALES_AT)
def test_blocks_of_at_most_4_bits_keep_their_numbers(name: str) -> None:
    """The rows of a layer may be in another order; other formats, and weights with other rows, become int8."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = drawn_blocks(kind, 24)
    weight = torch.from_numpy(gguf.dequantize(blocks, kind))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    few = name in {"Q4_0", "Q4_1", "Q4_K", "Q3_K", "Q2_K"}
    rearranged: list[tuple[bool, Callable[[Any], Any]]] = [
        (True, lambda rows: rows),
        (True, lambda rows: rows[order.numpy()]),
        (False, lambda rows: np.roll(rows, 1, 1)),
    ]
    for stays, arrange in rearranged:
        made = quantized_weight(weight_of(blocks, kind, arrange))
        int4 = few and stays
        assert (made.kind, made.dtype) == ("int4" if int4 else "int8", torch.bfloat16)
        wanted = torch.from_numpy(arrange(weight.numpy()).copy())
        error = (made.dequantized() - wanted).norm() / wanted.norm()
        assert error < (0.0005 if int4 else 0.008)
        bits = {"Q4_0": 4.5, "Q2_K": 6.0}.get(name, 5.0) if int4 else 8.5
        assert 8 * made.nbytes == bits * weight.numel()


def test_head_and_layers_whose_weight_is_read_directly_stay_unquantized() -> None:
    weight = weight_of(drawn_blocks(kind := gguf.GGMLQuantizationType.Q4_0, 24), kind, lambda a: a)
    model = nn.ModuleDict({name: nn.Linear(96, 24) for name in ("layer", "head", "dt_proj")})
    found: Any = types.SimpleNamespace(
        get_output_embeddings=lambda: model["head"], named_modules=model.named_modules
    )
    given = [dataclasses.replace(weight, name=f"{name}.weight") for name in model]
    assert packed_weights(found, given) == {"layer.weight"}


def test_convert_gguf_ends_at_tokens_that_end_a_turn(
    make: Make, tmp_path: Path, tokenizer: Any
) -> None:
    """Phi-4 and Gemma have one EOS token, and another one after an answer, which is known by its text."""
    convert(make(end="<|endoftext|>"), tmp_path / "made")
    ids = tokenizer.get_vocab()
    assert {*inspect(tmp_path / "made").stop_token_ids} == {ids["<|endoftext|>"], ids["<|im_end|>"]}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (transformers.Gemma2Config(num_hidden_layers=46, hidden_size=4608, head_dim=128), 144),
        (transformers.Gemma3TextConfig(num_hidden_layers=62, hidden_size=5376, head_dim=128), 168),
        (transformers.Gemma3TextConfig(num_hidden_layers=26, hidden_size=1152, head_dim=256), 256),
    ],
)
def test_attention_scores_of_gemma_are_scaled_as_in_llama_cpp(config: Any, wanted: int) -> None:
    config.num_attention_heads = 32
    _mend_scores(config)
    assert config.query_pre_attn_scalar == wanted


@pytest.mark.slow
def test_convert_gguf_that_is_interrupted_leaves_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then it has written some weights: it holds one file's at most."""
    source = make()
    monkeypatch.setattr(files, "SHARD_BYTES_MAX", 100_000)
    (tmp_path / "there").mkdir()
    received: list[tuple[str, float]] = []

    def progress(what: str, fraction: float) -> None:
        received.append((what, fraction))
        if fraction > 0.5:
            assert list((tmp_path / "there").glob(".made.*/made/*"))
            raise KeyboardInterrupt

    path = tmp_path / "there" / "made"
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(str(source), str(path), dtype="float32", progress=progress)
    assert received[-1][0] == "converting the weights"
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.slow
def test_conversion_in_a_process_of_its_own_reports_progress_errors_and_its_end(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption ends the process, too, and nothing is left."""
    file, path, reported = str(make()), tmp_path / "there" / "made", []

    def progress(label: str, fraction: float) -> None:
        reported.append(label)
        if len(reported) == limit:
            raise KeyboardInterrupt

    limit, run = 3, functools.partial(convert_in_child, dtype="auto", progress=progress)
    with pytest.raises(KeyboardInterrupt):
        run(file, str(path))
    assert not list(path.parent.iterdir())
    limit = 0
    assert run(file, str(path)) > 0
    assert reported[-1] == "writing the files"
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(CheckpointError, match=r"'text\.gguf' is not a whole GGUF file .*Rem"):
        run(str(tmp_path / "text.gguf"), str(tmp_path / "other"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match=r"the process ended with status 1\. Rem"):
        run(file, str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pre": "odd"}, r"'tiny\.gguf' splits words by the rule 'odd'.*Rem"),
        (
            {"without": "blk.1.ffn"},
            "'tiny.gguf' lacks 4 weights of the model, the first is model.layers.1.mlp.down_proj.w",
        ),
        (
            {"rope": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}},
            r"'tiny\.gguf' scales its rotary embedding in a way .*\(rope_freqs\.weight\).*Rem",
        ),
        (
            {"rope": {"rope_factors_long.weight": np.ones(8, np.float32), "type": "longrope"}},
            r"'tiny\.gguf' scales its rotary embedding in a way .*Rem",
        ),
    ],
)
def test_convert_gguf_refuses_an_unknown_rule_of_words_or_scaling_and_a_file_without_some_weights(
    make: Make, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    """Transformers would ignore the scaling, or initialize missing weights randomly."""
    with pytest.raises(CheckpointError, match=message):
        convert(make(**given), tmp_path / "made")
    assert not (tmp_path / "made").exists()


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e5, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0}


def divisors(rope: dict[str, Any]) -> Any:
    """Return the tensor that llama.cpp writes for Llama 3: plain frequencies divided by scaled ones."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 512}
    plain, scaled = (
        transformers.LlamaConfig(**sizes, rope_parameters=dict(each)) for each in (ROPE, rope)
    )
    made: Any = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    return (made(plain).inv_freq / made(scaled).inv_freq).numpy()


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        ({"rope_freqs.weight": divisors(LLAMA3)}, LLAMA3),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, YARN),
        ({"type": "linear", "factor": 8.0}, LINEAR),
        ({"type": "none"}, ROPE),
    ],
)
def test_convert_gguf_keeps_the_scaling_of_rotary_embeddings(
    make: Make, tmp_path: Path, rope: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """Llama 3's is a tensor."""
    convert(make(rope=rope), tmp_path / "made")
    found = json.loads((tmp_path / "made" / "config.json").read_text())["rope_parameters"]
    assert found == pytest.approx(wanted)
    assert inspect(tmp_path / "made").context_tokens == 512


def test_model_without_rotary_embedding_has_none_to_scale() -> None:
    """GPT-2 has learned positions."""
    reader = types.SimpleNamespace(get_field=lambda _: None, tensors=[])
    _mend_rope(transformers.GPT2Config(), "tiny.gguf", reader)


def test_convert_gguf_refuses_input_other_than_gguf(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    for name, message in (
        ("none", "is no file. Remedy"),
        ("text", "is not a whole GGUF file.*Rem"),
    ):
        with pytest.raises(CheckpointError, match=rf"'{name}\.gguf' {message}"):
            convert(tmp_path / f"{name}.gguf", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["text.gguf"]


def test_check_conversion_names_unmet_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="unknown data type 'int8'"):
        check_conversion(str(tmp_path / "made"), dtype="int8")
    (tmp_path / "other").write_text("something")
    with pytest.raises(CheckpointError, match="holds a checkpoint already, or other files"):
        check_conversion(str(tmp_path), dtype="bfloat16")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(
        CheckpointError, match=r"needs gguf. Remedy: pip install 'vsched\[convert\]'"
    ):
        check_conversion(str(tmp_path / "made"), dtype="bfloat16")
