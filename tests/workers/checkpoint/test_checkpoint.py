"""Reading, refusing and making checkpoints, of older and newer layouts; stop tokens and default sampling parameters."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.each_case import each_case
from tests.parity.architectures import make_checkpoint as make_parity_checkpoint
from tests.workers.driver import (
    Checkpoints,
    Driver,
    Question,
    Stage,
    drawn_image,
    inspect,
    load_encoder,
    load_generator,
)
from tests.workers.edited import Content, Copy, copy_of, merged, write
from vsched.errors import CheckpointError, ConfigError, RequestRefused
from vsched.types import ModelInfo, SamplingDefaults
from vsched.worker.contract import Preprocessor, WorkerSettings
from vsched_workers.checkpoint.facts import sampling_defaults, stop_token_ids
from vsched_workers.checkpoint.random_init import make_checkpoint
from vsched_workers.checkpoint.tokenizer_files import chat_templates, tokenizer_files
from vsched_workers.checkpoint.whole_model import load_whole
from vsched_workers.families import OwnQwen25Vl, language_family
from vsched_workers.families.qwen_image import PIXELS as PIXEL_VALUES
from vsched_workers.plugin import plugin

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
PROCESSOR = "processor_config.json"
WRONG_TYPE = "settings hold a value of the wrong type"


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Copy:
    """Return a copy of a checkpoint for a test to modify."""
    return lambda size="nano25": copy_of(checkpoints(size), tmp_path / "private")


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / WEIGHTS)


def write_tensors(path: Path, held: dict[str, torch.Tensor]) -> None:
    save_file(held, path / WEIGHTS, metadata={"format": "pt"})


def load(path: Path, stage: str) -> object:
    return (load_generator if stage == "generate" else load_encoder)(inspect(path))


def test_inspect_reports_the_facts(checkpoints: Checkpoints) -> None:
    info = inspect(checkpoints("nano3"), item_tokens_max=100)
    sizes = {True: 0, False: 0}
    for name, values in tensors(checkpoints("nano3")).items():
        sizes["visual" in name] += values.nbytes
    assert info == ModelInfo(
        family="qwen3_vl",
        path=str(checkpoints("nano3")),
        dtype="float32",
        hidden_size=64,
        embedding_levels=3,
        vocab_size=384,
        context_tokens=32768,
        kv_bytes_per_token=2 * 3 * 2 * 16 * 4,
        kv_heads_per_token=2 * 3 * 2,
        vision_bytes=sizes[True],
        language_bytes=sizes[False],
        ties_head=True,
        item_tokens_max=100,
        image_token_id=6,
        video_token_id=7,
        stop_token_ids=(2,),
    )
    budgets = {0: 1280, 64: 64, 5000: 1280}  # that of the checkpoint, a tighter one, a looser one
    for budget, most in budgets.items():
        assert inspect(checkpoints("nano25"), item_tokens_max=budget).item_tokens_max == most
    halved = inspect(checkpoints("nano3"), dtype="bfloat16")
    assert (halved.vision_bytes, halved.language_bytes) == (sizes[True] / 2, sizes[False] / 2)
    assert inspect(checkpoints("nano25"), dtype="bfloat16").kv_bytes_per_token == 256


def test_memory_that_runs_out_in_a_conversion_of_weights_is_told_as_such() -> None:
    """Transformers hides the cause in a report; the checkpoint is not broken."""

    class Model:
        config = None

        @classmethod
        def from_pretrained(cls, *_: object, **__: object) -> None:
            try:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            except RuntimeError:
                raise RuntimeError("issues during automatic conversion of the weights")  # noqa: B904

    with pytest.raises(MemoryError):
        load_whole(Model(), "", dtype=torch.float32, device="cpu", progress=lambda *_: None)


def test_inspect_reads_the_flat_layout_of_older_checkpoints(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    """Published Qwen2.5-VL checkpoints have the text sizes at the top level."""
    path = copy()
    config = json.loads((path / "config.json").read_text())
    text = {**config["text_config"], "model_type": config["model_type"]}
    flat = {**text, "text_config": None, "dtype": None, "torch_dtype": config["dtype"]}
    write(path / "config.json", flat)
    info, known = inspect(path), inspect(checkpoints("nano25"))
    assert msgspec.structs.replace(info, path=known.path) == known
    load(path, "generate")


def test_inspect_refuses_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, message in (
        ("nowhere", "'nowhere' does not exist. Remedy"),
        ("file", "'file' is a file"),
        ("", r"config\.json is missing"),
    ):
        with pytest.raises(CheckpointError, match=message) as error:
            inspect(tmp_path / name)
        assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", r"config\.json cannot be read"),
        ("config.json", b"[]", r"config\.json is not a JSON object"),
        ("config.json", b"\xff", r"config\.json cannot be read"),
        ("config.json", {"text_config": {"hidden_size": None}}, r"config\.json"),
        ("config.json", {"text_config": {"num_hidden_layers": "x"}}, r"config\.json"),
        ("config.json", {"image_token_id": None}, r"config\.json"),
        ("config.json", {"vision_config": {"patch_size": [1, 1]}}, r"config\.json"),
        ("config.json", {"model_type": "llama"}, "'llama' has a part for images"),
        ("config.json", {"quantization_config": {"quant_method": "awq"}}, "awq of None.*Supported"),
        ("config.json", {"text_config": {"use_sliding_window": True}}, "windows are not supported"),
        ("tokenizer.json", None, r"tokenizer\.json is missing"),
        (PROCESSOR, None, "no image processor settings"),
        (WEIGHTS, None, "found none"),
        ("pytorch_model.bin", b"", "never loaded.*convert the checkpoint to safetens"),
        (WEIGHTS, b"not safetensors", rf"{WEIGHTS} is corrupt"),
        ("vision.safetensors", None, r"vision\.safetensors, named by .*is missing"),
        ("vision.safetensors", b"cut", r"vision\.safetensors is corrupt.*download the file again"),
        (INDEX, b'{"weight_map": {"a": "../../etc/passwd"}}', "outside the checkpoint"),
        (INDEX, b'{"metadata": {}}', "has no weight_map"),
    ],
)
def test_inspect_refuses_unservable_models(
    copy: Copy, file: str, content: Content, message: str
) -> None:
    """Missing and broken files, a configuration without sense, and input that would run wrongly."""
    path = copy()
    if file in {INDEX, "vision.safetensors"}:
        shard(path)
    if file == "pytorch_model.bin":
        (path / WEIGHTS).unlink()
    write(path / file, content)
    with pytest.raises(CheckpointError, match=message) as error:
        inspect(path)
    assert "Remedy" in str(error.value)
    assert "private" not in str(error.value)


def test_inspect_refuses_an_unknown_type_and_a_negative_cap(checkpoints: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match="'int8' is not supported"):
        inspect(checkpoints("nano25"), dtype="int8")
    with pytest.raises(ConfigError, match="value -5, limit 1"):
        inspect(checkpoints("nano25"), item_tokens_max=-5)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "stage", "changes", "message"),
    [
        ("qwen2_5_vl", "generate", {UP: None}, "up_proj.weight is in none of.*Rem"),
        ("qwen2_5_vl", "encode", {"visual.merger.ln_q.weight": None}, "ln_q.weight is in none of"),
        ("qwen2_5_vl", "generate", {UP: torch.zeros(7)}, r"up_proj.* has shape \[7\].*\[96, 64"),
        ("qwen2_5_vl", "on two ranks", {UP: torch.zeros(6, 64)}, r"shape \[6, 64\].* for \[96, 64"),
        ("qwen2_5_vl", "generate", None, f"{WEIGHTS} is corrupt.*Remedy"),
        ("stablelm", "generate", {UP: None}, f"{UP} is in none.*Remedy: "),
        ("stablelm", "generate", {UP: torch.zeros(3, 64)}, f"{UP} has another shape.*Remedy: "),
        ("stablelm", "generate", None, "cannot be read.*Remedy: "),
    ],
)
def test_load_names_missing_tensors_those_of_another_shape_and_truncated_files(
    copy: Copy, tmp_path: Path, name: str, stage: str, changes: Any, message: str
) -> None:
    """Also on the generic path, where transformers would fill them with random values."""
    path = copy() if name == "qwen2_5_vl" else tmp_path
    if path is tmp_path:
        make_parity_checkpoint(name, path)
    info, held = inspect(path), tensors(path)
    if changes is None:
        write(path / WEIGHTS, (path / WEIGHTS).read_bytes()[:5000])
    else:
        held |= changes
        write_tensors(path, {key: tensor for key, tensor in held.items() if tensor is not None})
    load_stage = load_encoder if stage == "encode" else load_generator
    ranks = {"ranks": 2, "rendezvous": "/nowhere/else"} if stage == "on two ranks" else {}
    with pytest.raises(CheckpointError, match=message):
        load_stage(info, **ranks)


def shard(path: Path) -> dict[str, str]:
    """Split the weights into two files, vision and language, and write the index."""
    held = tensors(path)
    files = {
        name: "vision.safetensors" if "visual" in name else "language.safetensors" for name in held
    }
    for file in set(files.values()):
        part = {name: tensor for name, tensor in held.items() if files[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    (path / WEIGHTS).unlink()
    (path / INDEX).write_text(json.dumps({"weight_map": files}))
    return files


@pytest.mark.parametrize("size", ["nano25", "nano3"])
def test_each_stage_reads_its_own_weights_only(copy: Copy, size: str) -> None:
    path = copy(size)
    shard(path)
    info = inspect(path)
    for load_stage, other in ((load_generator, "vision"), (load_encoder, "language")):
        spoiled = path / f"{other}.safetensors"
        whole = spoiled.read_bytes()
        spoiled.write_bytes(b"")
        load_stage(info)
        spoiled.write_bytes(whole)


def test_make_checkpoint_is_reproducible(tmp_path: Path, checkpoints: Checkpoints) -> None:
    make_checkpoint(str(tmp_path / "again"), "nano25", dtype="float32")
    make_checkpoint(str(tmp_path / "other"), "nano25", dtype="float32", seed=1)
    for name in (WEIGHTS, "tokenizer.json", "config.json"):
        made = (checkpoints("nano25") / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == made
    other = tensors(tmp_path / "other")["model.embed_tokens.weight"]
    assert not np.array_equal(other, tensors(tmp_path / "again")["model.embed_tokens.weight"])


def test_make_checkpoint_reports_a_full_disk(tmp_path: Path) -> None:
    """The limit on the size of a file stands for the disk: writing fails in the same place."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"'made' cannot be written \(.*Remedy: free space"
        ):
            make_checkpoint(str(tmp_path / "made"), "nano25")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_make_checkpoint_refuses(tmp_path: Path, checkpoints: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match="unknown size 'giant'. Known: nano25"):
        make_checkpoint(str(tmp_path), "giant")
    with pytest.raises(CheckpointError, match="unknown data type 'int8'"):
        make_checkpoint(str(tmp_path), "nano25", dtype="int8")
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        make_checkpoint(str(checkpoints("nano25")), "nano25")


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 1}, (7, 9)),
        ({"eos_token_id": 7}, {"eos_token_id": 1}, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": 1}, (1,)),
        ({"eos_token_id": -1}, {"eos_token_id": 1}, (1,)),
        ({"eos_token_id": [-1]}, {"eos_token_id": [2, -1]}, (2,)),
        ({}, {"text_config": {"eos_token_id": [1, 2]}}, (1, 2)),
        ({}, {}, ()),
    ],
)
def test_stop_tokens_for_generation_win_over_the_models(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], ids: tuple[int, ...]
) -> None:
    folder = write(tmp_path / GENERATION, json.dumps(generation).encode())
    assert stop_token_ids(folder, config) == ids


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "<|im_end|>", "added_tokens_decoder": {"5": {"content": "<|im_end|>"}}},
        {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": {"5": "<|im_end|>"}},
        {"eos_token": "<|im_end|>"},
    ],
)
def test_stop_tokens_have_the_tokenizers_own(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A chat model ends its turns even if its generation settings only have the end of a document."""
    added = [{"id": 3, "content": "<s>"}, {"id": 5, "content": "<|im_end|>"}]
    write(tmp_path / "tokenizer_config.json", settings)
    write(tmp_path / "tokenizer.json", {"added_tokens": added, "model": {}})
    for stated, ids in ((2, (2, 5)), ([5, 2], (5, 2))):
        assert stop_token_ids(write(tmp_path / GENERATION, {"eos_token_id": stated}), {}) == ids


STATED: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1}
STATED |= {"repetition_penalty": 1.05}


@each_case(
    ("stated", "meant"),
    [
        ({}, SamplingDefaults()),
        ({**STATED, "do_sample": False, "max_new_tokens": 9}, SamplingDefaults(**STATED)),
        ({"top_k": -1}, SamplingDefaults()),
        ({"top_k": None, "temperature": None}, SamplingDefaults()),
        ({"temperature": 0}, SamplingDefaults(temperature=0)),
        ({"top_p": 0.0}, SamplingDefaults(top_k=1)),
        *(({name: each}, None) for name, each in (("temperature", "hot"), ("top_p", 1.5))),
        *(({name: each}, None) for name, each in (("top_k", 2.5), ("min_p", True))),
    ],
)
def test_sampling_defaults_are_those_of_the_checkpoint_and_are_refused_out_of_bounds(
    tmp_path: Path, stated: dict[str, Any], meant: SamplingDefaults | None
) -> None:
    write(tmp_path / GENERATION, json.dumps(stated).encode())
    if meant is None:
        (name,) = stated
        with pytest.raises(CheckpointError, match=rf"{name} is out of bounds: value .* Remedy"):
            sampling_defaults(tmp_path)
    else:
        assert sampling_defaults(tmp_path) == meant


EMBEDDING = "model.embed_tokens.weight"
PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
MESSAGES = [{"role": "user", "content": "Hello"}]
QUESTIONS = [Question("What is in the image?", count=6)]


def front_end(path: Path, *, chat_template: str = "") -> Preprocessor:
    info = msgspec.structs.replace(inspect(path), chat_template=chat_template)
    return plugin.load_preprocessor(info)


def answer(path: Path) -> tuple[list[int], int]:
    """Return a checkpoint's output, and the bytes of its language model."""
    stage = Stage.load(path)
    said = Driver(stage, chunk=64).run(QUESTIONS)[0].output
    return said, stage.generator.weights_bytes


def test_a_tied_head_may_be_stored_next_to_its_embedding_or_under_its_own_name(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    """It is in memory once."""
    path, wanted = copy(), answer(checkpoints("nano25"))
    held = tensors(path)
    write_tensors(path, {**held, "lm_head.weight": held[EMBEDDING].clone()})
    assert answer(path) == wanted
    held["lm_head.weight"] = held.pop(EMBEDDING)
    write_tensors(path, held)
    assert answer(path) == wanted
    untied = {"tie_word_embeddings": False}
    write(path / "config.json", {**untied, "text_config": untied})
    head = held.pop("lm_head.weight")
    for name, kept in (("embed_tokens", "lm_head.weight"), ("lm_head", EMBEDDING)):
        write_tensors(path, {**held, kept: head})
        with pytest.raises(CheckpointError, match=rf"{name}\.weight is in none of"):
            load(path, "generate")


def test_a_head_that_differs_from_the_embedding_is_not_tied(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    """As in transformers: `config.json` is wrong then."""
    path = copy()
    held = tensors(path)
    head = held[EMBEDDING].clone()
    head[-1] += 1.0  # one row after all compared blocks
    write_tensors(path, {**held, "lm_head.weight": head})
    stages = [Stage.load(each) for each in (path, checkpoints("nano25"))]
    assert stages[0].generator.weights_bytes == stages[1].generator.weights_bytes + head.nbytes


def template(name: str) -> str:
    return f"{name}:{{{{ messages[0].content }}}}"


def write_template(path: Path, layout: str, name: str) -> None:
    """Write a template, and other named ones if the layout supports that."""
    named = [{"name": each, "template": template(each)} for each in (name, "tool_use")]
    match layout:
        case "jinja":
            write(path / "chat_template.jinja", template(name).encode())
        case "more":
            (path / "additional_chat_templates").mkdir()
            write(path / "additional_chat_templates" / f"{name}.jinja", template(name).encode())
        case "list":
            write(path / "tokenizer_config.json", {"chat_template": named})
        case _:
            write(path / f"{layout}.json", {"chat_template": template(name)})


@pytest.fixture
def untold(copy: Copy) -> Path:
    """Return a copy of a checkpoint without its template."""
    return write(copy() / "chat_template.jinja", None)


@pytest.mark.parametrize(
    "layouts",
    [
        ["jinja"],
        ["tokenizer_config"],
        ["tokenizer_config", "jinja"],
        ["jinja", "chat_template"],
        ["jinja", "chat_template", "processor_config"],
    ],
)
def test_chat_templates_are_found_where_transformers_finds_them(
    untold: Path, layouts: list[str]
) -> None:
    """The last of these is used."""
    for layout in layouts:
        write_template(untold, layout, layout)
    assert front_end(untold).render(MESSAGES) == f"{layouts[-1]}:Hello"


@pytest.mark.parametrize("layout", ["more", "list"])
def test_chat_templates_have_names(untold: Path, layout: str, tmp_path: Path) -> None:
    """`model.chat_template` selects one by name, or a file."""
    if layout == "more":
        write_template(untold, "jinja", "default")
        write_template(untold, "more", "tool_use")
    else:
        write_template(untold, "list", "default")
    assert set(chat_templates(untold)) == {"default", "tool_use"}
    file = tmp_path / "mine.jinja"
    file.write_text(template("mine"))
    for chosen, used in (("", "default"), ("tool_use", "tool_use"), (str(file), "mine")):
        assert front_end(untold, chat_template=chosen).render(MESSAGES) == f"{used}:Hello"
    with pytest.raises(CheckpointError, match=r"'rag' is no file, .*(default, tool_use).*Remedy"):
        front_end(untold, chat_template="rag")
    if layout == "list":
        write_template(untold, "list", "rag")
        with pytest.raises(CheckpointError, match=r"no default: rag, tool_use. Remedy: set model"):
            front_end(untold)


def test_a_checkpoint_without_chat_template_completes_prompts(untold: Path) -> None:
    loaded = front_end(untold)
    assert loaded.detokenize(loaded.tokenize("Hello there")) == "Hello there"
    with pytest.raises(RequestRefused, match="no chat template. Remedy: .*/v1/completions") as no:
        loaded.render(MESSAGES)
    assert no.value.code == "chat_template_missing"


def test_a_tokenizer_is_made_from_vocabulary_and_merges(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    """As in checkpoints from before tokenizer.json existed."""
    path = copy()
    known_tokens = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").unlink()
    model = known_tokens["model"]
    added = {str(one.pop("id")): one for one in known_tokens["added_tokens"]}
    write(path / "vocab.json", model["vocab"])
    merges = [" ".join(pair) for pair in model["merges"]]
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
    write(path / "tokenizer_config.json", settings)
    assert tokenizer_files(path) == "vocab.json and merges.txt"
    made, known = front_end(path), front_end(checkpoints("nano25"))
    for text in ("What is in the image?", "naïve café <|im_end|>"):
        assert made.tokenize(text) == known.tokenize(text)
    assert made.info.stop_token_ids == known.info.stop_token_ids


@pytest.mark.parametrize(
    ("file", "written", "message"),
    [
        (None, b"", "found none"),
        ("qwen.tiktoken", b"IQ== 0\n", r"found qwen\.tiktoken, which only code of the checkpoint"),
        ("tokenizer.model", b"\n\x0e\n\x05<unk>", "tokenizer.model is converted with .*sentencepi"),
        ("tokenizer.model", b"IQ== 0\n", "tokenizer.model is converted with tiktoken"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_reported_at_once(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, file: str | None, written: bytes, message: str
) -> None:
    path = copy()
    (path / "tokenizer.json").unlink()
    if file is not None:
        (path / file).write_bytes(written)
    monkeypatch.setattr(
        "vsched_workers.checkpoint.tokenizer_files._is_installed", lambda _name: False
    )
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json is missing.*{message}.*Remedy"):
        inspect(path)


def test_a_token_that_only_the_tokenizer_knows_does_no_harm(copy: Copy) -> None:
    """Such as an image placeholder in the text model of a family that has images, too."""
    path = copy()
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"id": 384, "content": "<image>", "special": True, **flags}
    known = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    write(path / "tokenizer.json", {"added_tokens": [*known, added]})
    loaded = front_end(path)
    assert loaded.info.vocab_size == 384
    assert loaded.tokenize("a<image>")[-1] == 384  # the engine refuses it


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("tokenizer_config.json", {"extra_special_tokens": 1.5}, WRONG_TYPE),
        (PROCESSOR, {"video_processor": {"size": {"shortest_edge": "small"}}}, WRONG_TYPE),
        (PROCESSOR, {"video_processor": {"size": {"longest_edge": math.inf}}}, WRONG_TYPE),
        (PROCESSOR, {"image_processor": {"patch_size": 16}}, "patch_size is 16"),
        (PROCESSOR, {"image_processor": {"do_resize": False}}, "do_resize is False"),
    ],
)
def test_load_preprocessor_refuses_settings_that_it_cannot_keep(
    copy: Copy, file: str, settings: dict[str, Any], message: str
) -> None:
    path = copy()
    write(path / file, settings)
    with pytest.raises(CheckpointError, match=f"{message}.*Remedy"):
        front_end(path)


def test_ranks_read_the_numbers_that_python_writes_into_json(copy: Copy) -> None:
    """`Infinity`, as in files that transformers writes, is no JSON for other readers."""
    path = copy()
    write(path / "config.json", {"unknown": math.inf})
    assert isinstance(language_family("qwen2_5_vl", str(path), WorkerSettings()), OwnQwen25Vl)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_processor_type": "Qwen2VLImageProcessorFast"},
        {"image_processor_type": "Qwen2_5_VLImageProcessor", "size": None, **PIXELS},
        {"image_processor_type": None, "size": PIXELS, **PIXELS},
        {"image_processor_type": None, "feature_extractor_type": "Qwen2VLFeatureExtractor"},
        {"rescale_factor": 0.00392156862745098, "do_convert_rgb": None},
    ],
)
def test_image_processor_settings_of_older_layouts(
    checkpoints: Checkpoints, copy: Copy, changes: dict[str, Any]
) -> None:
    """Also next to a `processor_config.json` that names no image processor."""
    path = copy()
    settings = json.loads((path / PROCESSOR).read_text())["image_processor"]
    write(path / "preprocessor_config.json", merged(settings, changes))
    write(path / PROCESSOR, None)
    if not changes:
        write(path / PROCESSOR, {"processor_class": "Qwen2_5_VLProcessor"})
    made, known = front_end(path), front_end(checkpoints("nano25"))
    assert made.info.item_tokens_max == known.info.item_tokens_max
    for size in ((90, 60), (500, 30), (2000, 1500)):
        assert made.plan_image(*size) == known.plan_image(*size)
    found, wanted = (each.process_image(drawn_image(1, 90, 60)) for each in (made, known))
    assert (found[PIXEL_VALUES] == wanted[PIXEL_VALUES]).all()


def test_a_family_is_known_by_its_class_if_its_name_is_not(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    """A publisher's own name for an architecture that is Qwen2.5-VL in all but name."""
    path = copy()
    write(path / "config.json", {"model_type": "our_own_vl"})
    assert msgspec.structs.replace(inspect(path), path="") == msgspec.structs.replace(
        inspect(checkpoints("nano25")), path=""
    )
    assert answer(path) == answer(checkpoints("nano25"))
    write(path / "config.json", {"architectures": ["OurOwnForConditionalGeneration"]})
    with pytest.raises(CheckpointError, match="'our_own_vl' is not supported"):
        inspect(path)
