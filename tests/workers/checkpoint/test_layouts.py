"""Published layouts of checkpoints: by older and newer versions of transformers, and by other tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from tests.workers.driver import Driver, Question, Stage
from vsched.errors import CheckpointError, RequestRefused
from vsched.types import ModelInfo
from vsched.worker.contract import Preprocessor
from vsched_workers.checkpoint.tokenizer_files import chat_templates, tokenizer_files
from vsched_workers.families.qwen_image import PIXELS as PIXEL_VALUES
from vsched_workers.plugin import plugin

WEIGHTS = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
MESSAGES = [{"role": "user", "content": "Hello"}]
QUESTIONS = [Question("What is in the image?", count=6)]

Checkpoints = Callable[[str], Path]
Copy = Callable[..., Path]


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Copy:
    """Return a copy of a checkpoint for a test to modify."""

    def copy_one(size: str = "nano25") -> Path:
        return Path(shutil.copytree(checkpoints(size), tmp_path / "copy"))

    return copy_one


def inspect(path: Path) -> ModelInfo:
    return plugin.inspect(str(path), dtype="auto", item_tokens_max=0)


def front_end(path: Path, *, chat_template: str = "") -> Preprocessor:
    info = msgspec.structs.replace(inspect(path), chat_template=chat_template)
    return plugin.load_preprocessor(info)


def edit(file: Path, **values: object) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **values}))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path / WEIGHTS, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def answer(path: Path) -> tuple[list[int], int]:
    """Return a checkpoint's output, and the bytes of its language model."""
    stage = Stage.load(str(path), attention="exact", dtype="auto")
    said = Driver(stage, chunk=64).run(QUESTIONS)[0].output
    return said, stage.generator.weights_bytes


# --- weights ---


def test_weights_in_many_files_are_those_in_one(checkpoints: Checkpoints, copy: Copy) -> None:
    path = copy()
    library: Any = transformers
    model = library.AutoModelForImageTextToText.from_pretrained(str(path), local_files_only=True)
    (path / WEIGHTS).unlink()
    model.save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    assert answer(path) == answer(checkpoints("nano25"))


def test_tied_head_stored_next_to_its_embedding_is_the_embedding(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    """It is in memory once."""
    path = copy()
    held = tensors(path)
    save_file({**held, "lm_head.weight": held[EMBEDDING].clone()}, path / WEIGHTS)
    assert answer(path) == answer(checkpoints("nano25"))


def test_a_head_that_differs_from_the_embedding_is_not_tied(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    """As in transformers: `config.json` is wrong then."""
    path = copy()
    held = tensors(path)
    head = held[EMBEDDING].clone()
    head[-1] += 1.0  # one row after all compared blocks
    save_file({**held, "lm_head.weight": head}, path / WEIGHTS)
    stage = Stage.load(str(path), attention="exact", dtype="auto")
    _, once = answer(checkpoints("nano25"))
    assert stage.generator.weights_bytes == once + head.nbytes


def test_a_tied_embedding_may_lie_under_the_name_of_the_head(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    path = copy()
    held = tensors(path)
    held["lm_head.weight"] = held.pop(EMBEDDING)
    save_file(held, path / WEIGHTS)
    assert answer(path) == answer(checkpoints("nano25"))
    untied = json.loads((path / "config.json").read_text())
    untied["text_config"]["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps({**untied, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is in none"):
        answer(path)


# --- chat templates ---


def template(name: str) -> str:
    return f"{name}:{{{{ messages[0].content }}}}"


def write_template(path: Path, layout: str, name: str) -> None:
    """Write a template, and other named ones if the layout supports that."""
    named = [{"name": each, "template": template(each)} for each in (name, "tool_use")]
    match layout:
        case "jinja":
            (path / "chat_template.jinja").write_text(template(name))
        case "more":
            (path / "additional_chat_templates").mkdir()
            (path / "additional_chat_templates" / f"{name}.jinja").write_text(template(name))
        case "tokenizer":
            edit(path / "tokenizer_config.json", chat_template=template(name))
        case "list":
            edit(path / "tokenizer_config.json", chat_template=named)
        case "processor":
            edit(path / "processor_config.json", chat_template=template(name))
        case "json":
            edit(path / "chat_template.json", chat_template=template(name))


@pytest.mark.parametrize(
    ("layouts", "used"),
    [
        (["jinja"], "jinja"),
        (["tokenizer"], "tokenizer"),
        (["tokenizer", "jinja"], "jinja"),
        (["jinja", "json"], "json"),
        (["jinja", "json", "processor"], "processor"),
        (["jinja", "more"], "jinja"),
    ],
)
def test_chat_templates_are_found_where_transformers_finds_them(
    copy: Copy, layouts: list[str], used: str
) -> None:
    path = copy()
    (path / "chat_template.jinja").unlink()
    for layout in layouts:
        write_template(path, layout, layout)
    assert front_end(path).render(MESSAGES) == f"{used}:Hello"


@pytest.mark.parametrize("layout", ["more", "list"])
def test_chat_templates_have_names(copy: Copy, layout: str, tmp_path: Path) -> None:
    """`model.chat_template` selects one by name, or a file."""
    path = copy()
    (path / "chat_template.jinja").unlink()
    if layout == "more":
        write_template(path, "jinja", "default")
        write_template(path, "more", "tool_use")
    else:
        write_template(path, "list", "default")
    assert set(chat_templates(path)) == {"default", "tool_use"}
    assert front_end(path).render(MESSAGES) == "default:Hello"
    assert front_end(path, chat_template="tool_use").render(MESSAGES) == "tool_use:Hello"
    file = tmp_path / "mine.jinja"
    file.write_text(template("mine"))
    assert front_end(path, chat_template=str(file)).render(MESSAGES) == "mine:Hello"
    with pytest.raises(CheckpointError, match=r"'rag' is no file, .*(default, tool_use).*Remedy"):
        front_end(path, chat_template="rag")


def test_chat_templates_without_a_default_must_be_chosen_from(copy: Copy) -> None:
    path = copy()
    (path / "chat_template.jinja").unlink()
    write_template(path, "list", "rag")
    with pytest.raises(CheckpointError, match=r"no default: rag, tool_use. Remedy: set model\."):
        front_end(path)
    assert front_end(path, chat_template="rag").render(MESSAGES) == "rag:Hello"


def test_a_checkpoint_without_chat_template_completes_prompts(copy: Copy) -> None:
    path = copy()
    (path / "chat_template.jinja").unlink()
    loaded = front_end(path)
    assert loaded.detokenize(loaded.tokenize("Hello there")) == "Hello there"
    with pytest.raises(RequestRefused, match="no chat template. Remedy: .*/v1/completions"):
        loaded.render(MESSAGES)


# --- tokenizers ---


def test_a_tokenizer_is_made_from_vocabulary_and_merges(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    """As in checkpoints from before tokenizer.json existed."""
    path = copy()
    content = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").unlink()
    model = content["model"]
    added = {one["id"]: one for one in content["added_tokens"]}
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    edit(
        path / "tokenizer_config.json",
        tokenizer_class="Qwen2Tokenizer",
        added_tokens_decoder={
            str(index): {key: value for key, value in one.items() if key != "id"}
            for index, one in added.items()
        },
    )
    assert tokenizer_files(path) == "vocab.json and merges.txt"
    made, known = front_end(path), front_end(checkpoints("nano25"))
    for text in ("What is in the image?", "naïve café <|im_end|>"):
        assert made.tokenize(text) == known.tokenize(text)
    assert made.info.stop_token_ids == known.info.stop_token_ids


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, b"", "found none"),
        ("qwen.tiktoken", b"IQ== 0\n", r"found qwen\.tiktoken, which only code of the checkpoint"),
        ("tokenizer.model", b"\n\x0e\n\x05<unk>", "tokenizer.model is converted with .*sentencepi"),
        ("tokenizer.model", b"IQ== 0\n", "tokenizer.model is converted with tiktoken"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_reported_at_once(
    copy: Copy,
    monkeypatch: pytest.MonkeyPatch,
    file: str | None,
    content: bytes,
    message: str,
) -> None:
    path = copy()
    (path / "tokenizer.json").unlink()
    if file is not None:
        (path / file).write_bytes(content)
    monkeypatch.setattr(
        "vsched_workers.checkpoint.tokenizer_files._is_installed", lambda _name: False
    )
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json is missing.*{message}.*Remedy"):
        inspect(path)


def test_a_token_that_only_the_tokenizer_knows_does_no_harm(copy: Copy) -> None:
    """Such as an image placeholder in the text model of a family that has images, too."""
    path = copy()
    content = json.loads((path / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": 384, "content": "<image>", "special": True, **flags})
    (path / "tokenizer.json").write_text(json.dumps(content))
    loaded = front_end(path)
    assert loaded.info.vocab_size == 384
    assert loaded.tokenize("a<image>")[-1] == 384  # the engine refuses it


# --- image processors ---


def processor(path: Path) -> dict[str, Any]:
    settings = json.loads((path / "processor_config.json").read_text())["image_processor"]
    return dict(settings)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_processor_type": "Qwen2VLImageProcessorFast"},
        {"image_processor_type": "Qwen2_5_VLImageProcessor"},
        {"image_processor_type": None},
        {"image_processor_type": None, "feature_extractor_type": "Qwen2VLFeatureExtractor"},
        {"size": None, **PIXELS},
        {"size": PIXELS, **PIXELS},
        {"rescale_factor": 0.00392156862745098, "do_convert_rgb": None},
    ],
)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a processor_config"])
def test_image_processor_settings_of_older_layouts(
    checkpoints: Checkpoints, copy: Copy, changes: dict[str, Any], beside: bool
) -> None:
    from PIL import Image

    path = copy()
    settings = {**processor(path), **changes}
    settings = {key: value for key, value in settings.items() if value is not None}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    (path / "processor_config.json").unlink()
    if beside:
        edit(path / "processor_config.json", processor_class="Qwen2_5_VLProcessor")
    made, known = front_end(path), front_end(checkpoints("nano25"))
    assert made.info.item_tokens_max == known.info.item_tokens_max
    for size in ((90, 60), (500, 30), (2000, 1500)):
        assert made.plan_image(*size) == known.plan_image(*size)
    image = Image.linear_gradient("L").convert("RGB").resize((90, 60))
    assert (
        made.process_image(image)[PIXEL_VALUES] == known.process_image(image)[PIXEL_VALUES]
    ).all()


# --- families ---


def test_a_family_is_known_by_its_class_if_its_name_is_not(
    checkpoints: Checkpoints, copy: Copy
) -> None:
    """A publisher's own name for an architecture that is Qwen2.5-VL in all but name."""
    path = copy()
    edit(path / "config.json", model_type="our_own_vl")
    assert msgspec.structs.replace(inspect(path), path="") == msgspec.structs.replace(
        inspect(checkpoints("nano25")), path=""
    )
    assert answer(path) == answer(checkpoints("nano25"))
    edit(path / "config.json", architectures=["OurOwnForConditionalGeneration"])
    with pytest.raises(CheckpointError, match="'our_own_vl' is not supported"):
        inspect(path)
