"""`vsched check`: properties of a checkpoint, and whether it can be served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.each_case import each_case
from tests.machines import pretend_cores
from vsched.cli import app, main
from vsched.errors import CheckpointError

pytest.importorskip("torch")  # so that the command does not hide it from this process

from tests.parity.architectures import make_checkpoint
from tests.parity.vision_checkpoints import make_vision_checkpoint

DEMO = Path(__file__).parents[3] / "workers" / "demo-model"


def check(path: Path, *words: str) -> tuple[int, str]:
    main.import_commands()
    done = CliRunner().invoke(app, ["check", str(path), *words], catch_exceptions=False)
    return done.exit_code, done.stdout


def check_json(path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status, output = check(path, *words, "--json", "-")
    report: dict[str, Any] = json.loads(output)
    return status, report


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """Return a copy of the demo model with other values in its `config.json`."""

    def copy_one(**values: object) -> Path:
        path = Path(shutil.copytree(DEMO, tmp_path / "copy"))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **values}))
        return path

    return copy_one


def test_check_reports_all_of_a_checkpoint_that_can_be_served() -> None:
    status, output = check(DEMO, "--set", "generate.memory_limit=1GiB")
    assert status == 0
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[0] == "demo-model"
    assert lines[-1] == "It can be served."
    for expected in (
        "family qwen2_5_vl (Qwen2_5_VLForConditionalGeneration)",
        "path fused",
        "language model 4 layers, 128 wide, 4 heads, 2 KV heads, 512 tokens of vocabulary",
        "tokenizer tokenizer.json",
        "chat templates default",
        "served in bfloat16",
        "context 4,096 tokens",
        "end tokens 2",
        "sampling temperature 1, nothing cut off",
        "image 448x448: 36 tokens",
        "video 256 frames of 640x360: 5,760 tokens, 26.2 MiB of pixels; arena.pixel_bytes holds 39",
    ):
        assert any(line.startswith(expected) for line in lines), expected
    (generate,) = [line for line in lines if line.startswith("generate rank")]
    assert "KV 1.0 KiB a token, 4.0 MiB a full context; limit 1.00 GiB: KV for" in generate
    (parameters,) = [line for line in lines if line.startswith("parameters")]
    assert "in bfloat16; 1 file," in parameters


def test_check_reports_threads_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads at the start, and whether a rank may use fewer; processes next to the engine's."""
    pretend_cores(monkeypatch, 16)
    sets = ["--set", "placement=separate", "--set", "encode.threads=3"]
    _, output = check(DEMO, *sets, "--set", "server.processes=3")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert [line for line in lines if line.startswith(("threads", "HTTP"))] == [
        "threads encode rank: 3 threads (fixed by encode.threads)",
        "threads generate rank: 8 threads (adapts to other programs' load)",
        "HTTP in 3 processes next to the engine's",
    ]
    _, output = check(DEMO, "--set", "generate.threads=1")
    assert "generate rank: 1 thread\n" in output
    assert "HTTP" not in output


def test_check_reports_the_memory_of_the_states_of_all_slots(tmp_path: Path) -> None:
    make_checkpoint("lfm2", tmp_path)
    sets = ("--set", "generate.slots=10", "--set", "generate.memory_limit=1GiB")
    status, report = check_json(tmp_path, *sets)
    memory = report["memory"]["generate"]
    assert (status, memory["state_bytes"]) == (0, 20 * report["info"]["state_bytes"])
    room = (1 << 30) - memory["weights_bytes"] - memory["state_bytes"]
    assert memory["kv_tokens_max"] == room // memory["kv_bytes_per_token"]
    _, output = check(tmp_path, *sets)
    assert "states of all slots and snapshots 30.0 KiB" in output


@each_case(
    ("name", "changes", "windows"),
    [
        ("gemma2", {}, "9 tokens in 2 layers"),
        ("mistral", {}, "9 tokens in 4 layers"),
        ("mistral", {"sliding_window": 512}, ""),
        ("llama", {}, ""),
    ],
)
def test_check_reports_that_layers_with_windows_keep_whole_contexts(
    tmp_path: Path, name: str, changes: dict[str, Any], windows: str
) -> None:
    """On every path; a window of the whole context does not count."""
    path = tmp_path / f"{name}{len(changes)}"
    make_checkpoint(name, path, **changes)
    status, output = check(path)
    said = [line.split(maxsplit=1)[1] for line in output.splitlines() if " windows " in line]
    assert said == [f"{windows}, which keep KV for the whole context, too"] * bool(windows)
    assert status == 0


@pytest.mark.parametrize(
    "name",
    ["gemma3", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("llava", "paligemma"))],
)
def test_check_reports_the_tokens_of_images_of_any_architecture(tmp_path: Path, name: str) -> None:
    make_vision_checkpoint(name, tmp_path)
    status, report = check_json(tmp_path)
    tokens = report["info"]["item_tokens_max"]
    assert (status, report["path"]) == (0, "generic")
    assert report["image_tokens"] == dict.fromkeys(("448x448", "1024x768", "1920x1080"), tokens)
    assert report["memory"]["encode"]["weights_bytes"] > 0
    assert report["memory"]["generate"]["kv_bytes_per_token"] > 0
    few = ("generate.slots=8", "generate.chunk_tokens=2", f"generate.max_batch_tokens={tokens + 7}")
    status, report = check_json(tmp_path, *(word for one in few for word in ("--set", one)))
    assert status == (name != "llava")
    assert ("one step must hold an image whole" in str(report["problems"])) == (name != "llava")


def test_check_writes_json(tmp_path: Path) -> None:
    status, report = check_json(DEMO, "--set", "generate.memory_limit=1GiB")
    assert (status, report["served"], report["path"], report["problems"]) == (0, True, "fused", [])
    assert report["info"]["family"] == "qwen2_5_vl"
    assert set(report["image_tokens"]) == {"448x448", "1024x768", "1920x1080"}
    memory = report["memory"]["generate"]
    assert memory["weights_bytes"] == report["description"]["parameters"]["language"] * 2
    assert memory["kv_bytes_per_token"] == 1024
    assert memory["kv_tokens_max"] == ((1 << 30) - memory["weights_bytes"]) // 1024
    check(DEMO, "--json", str(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text())["served"] is True


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "unheard_of", "architectures": None}, "'unheard_of' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "Supported: compressed-tensors"),
        ({"image_token_id": None}, "image_token_id is missing"),
        ("generate.attention=nope", "generate.attention: unknown value 'nope'"),
        ("generate.weights=int8 --set=model.dtype=float16", "int8 is not possible on cpu"),
        (
            "generate.weights=int8 --set=generate.tensor_parallel=2",
            "set generate.weights_group to 64",
        ),
        ("encode.device=tpu", "encode.device: not a device"),
    ],
)
def test_check_reports_why_a_checkpoint_cannot_be_served(
    copy: Callable[..., Path], values: dict[str, object] | str, reason: str
) -> None:
    """Values of its config.json, or settings with which no rank loads. Its known properties are still reported."""
    path, words = (copy(**values), "") if isinstance(values, dict) else (DEMO, f"--set={values}")
    status, report = check_json(path, *words.split())
    assert (status, report["served"], report["path"]) == (1, False, "refused")
    assert reason in report["problems"][0]
    assert report["description"]["parameters"]["language"] > 0


SHORT = ("--set", "generate.memory_limit=4MiB")


def test_check_reports_a_tokenizer_and_a_limit_that_cannot_serve(copy: Callable[..., Path]) -> None:
    """Nor a limit with too little room for one request of the longest context, which serving would refuse, too."""
    path, limit = copy(), ("--set", "generate.memory_limit=1KiB")
    (path / "tokenizer.json").write_text("{}")
    tokenizer, room = check_json(path, *limit)[1]["problems"]
    assert "tokenizer cannot be loaded" in tokenizer
    assert room.startswith("generate.memory_limit: no room next to the weights")
    assert (
        "of the longest context does not fit: value" in check_json(DEMO, *SHORT)[1]["problems"][0]
    )
    assert check_json(DEMO, *SHORT, "--set=generate.context_tokens=1024")[0] == 0
    status, output = check(path, *limit)
    assert status == 1
    assert output.splitlines()[-1].startswith("It cannot be served: ")


def memory_of(*sets: str) -> dict[str, Any]:
    """Return the reported memory of the demo model, by stage."""
    words = [word for each in sets for word in ("--set", each)]
    memory: dict[str, Any] = check_json(DEMO, *words)[1]["memory"]
    return memory


@each_case(("stage", "kind"), [("encode", "int8"), ("generate", "int4")])
def test_check_counts_a_scale_for_each_group_of_inputs(stage: str, kind: str) -> None:
    """Smaller groups have more scales; 0 stands for groups of the default size."""
    of = {
        group: memory_of(f'{stage}.weights="{kind}"', f"{stage}.weights_group={group}")[stage]
        for group in (0, 16, 64, 128)
    }
    default, *others = (found["weights_bytes"] for found in of.values())
    assert others == sorted(set(others), reverse=True)
    assert default == others[2] if kind == "int8" else others[0] > default > others[1]


def test_check_counts_the_draft_model_and_the_embedding_of_each_rank() -> None:
    """Draft weights are part of the stage, draft KV of each token. Ranks divide layers, not the embedding."""
    shared, embedding = memory_of("generate.tensor_parallel=2")["generate"], 512 * 128 * 2
    plain, both = memory_of()["generate"], memory_of(f"generate.draft_model={DEMO}")["generate"]
    for name in ("weights_bytes", "kv_bytes_per_token"):
        assert both[name] == 2 * plain[name]
    assert shared["weights_bytes"] == plain["weights_bytes"] // 2 + embedding


def test_check_counts_shards_and_names_missing_ones(copy: Callable[..., Path]) -> None:
    path = copy()
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "other.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "chat_template.jinja").unlink()
    status, report = check_json(path)
    assert status == 1
    assert "other.safetensors, named by model.safetensors.index.json, is missing" in str(report)
    assert report["description"]["files"] == 1
    assert any(thing.startswith("chat requests") for thing in report["unsupported"])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, ""),
        ("{{ raise_exception('no video') }}", "rejects the messages: no video"),
        ("{% for", "rejects the messages: "),
        ("{{ messages[0]['content'][-1]['text'] }}", "leaves out videos"),
    ],
)
def test_check_reports_a_chat_template_without_videos(
    copy: Callable[..., Path], template: str | None, reason: str
) -> None:
    path = copy()
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    unsupported = check_json(path)[1]["unsupported"]
    assert any(each.startswith("chat requests: ") for each in unsupported) == ("rejects" in reason)
    found = [each for each in unsupported if each.startswith("videos")]
    assert len(found) == bool(reason)
    assert reason in "".join(found)


def test_check_reports_why_a_model_takes_no_videos(tmp_path: Path) -> None:
    config = {"model_type": "kimi_k25", "video_token_id": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "videos (its vision tower merges frames over time" in str(check_json(tmp_path)[1])


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("llama", "fused", ""),
        ("stablelm", "generic", ""),
        ("bloom", "refused", "attention of its own"),
        ("llama4_text", "refused", "temperatures that follow a token's place"),
    ],
)
def test_check_reports_any_language_model_before_its_weights_are_read(
    tmp_path: Path, name: str, path: str, reason: str
) -> None:
    """Whether an architecture's attention can be replaced is known once it is built."""
    make_checkpoint(name, tmp_path / name)
    weights = tmp_path / name / "model.safetensors"
    content = weights.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    weights.write_bytes(content[:header] + b"\xff" * (len(content) - header))
    status, report = check_json(tmp_path / name)
    assert (report["path"], status) == (path, 1 if reason else 0)
    assert reason in "".join(report["problems"])
    assert not report["image_tokens"]
    assert "encode" not in report["memory"]


def test_check_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'nowhere' does not exist. Remedy"):
        check(tmp_path / "nowhere")
