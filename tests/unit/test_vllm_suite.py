"""The pure parts of the runner of vLLM's tests: reports, reasons, tables, and settings from arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm_suite import adapter, reasons, shim, table
from vsched.config import load_config

REPORTS = [
    {"test": "test_good", "outcome": "passed"},
    {"test": "test_bad", "outcome": "failed", "message": "AssertionError: 400 | is\nnot 200"},
    {"test": "test_far", "outcome": "failed", "text": "OSError: couldn't connect to 'https://hub'"},
    {"test": "test_ours", "outcome": "skipped", "message": "Skipped: not applicable: audio"},
    {"test": "test_theirs", "outcome": "skipped", "message": "Skipped: no GPU"},
]


def outcomes() -> list[table.Outcome]:
    lines = [json.dumps({"file": "a.py", "outcomes": many}) for many in (REPORTS[:1], REPORTS)]
    return [table.judge("a.py", report) for report in table.read(lines)["a.py"]]


def test_judge_reports_what_became_of_each_test_of_the_last_run() -> None:
    """Failures have their first line; tests that need a download or were skipped have their reason."""
    assert [(o.test, o.kind, o.why) for o in outcomes()] == [
        ("test_good", "passed", ""),
        ("test_bad", "failed", "AssertionError: 400 | is"),
        ("test_far", "not applicable", "a download"),
        ("test_ours", "not served", "audio"),
        ("test_theirs", "not applicable", "no GPU"),
    ]


def test_answers_of_a_larger_model_are_excused_by_name_and_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another error of the same test is a failure."""
    monkeypatch.setattr(reasons, "ANSWERS", (("test_sum", r"assert '[^']*' == '2'"),))
    assert reasons.by_failure("a.py::test_sum", "assert '3' == '2'") == reasons.OF_A_LARGER_MODEL
    assert reasons.by_failure("a.py::test_sum", "Error code: 500") is None
    assert reasons.by_failure("a.py::test_other", "assert '3' == '2'") is None


def test_write_counts_by_file_and_reason_and_names_what_failed() -> None:
    """A file without applicable tests is in the total alone; bars in errors do not break the table."""
    skipped = [table.Outcome("all", "not served", "audio")]
    lines = table.write({"a.py": outcomes(), "b.py": skipped}).splitlines()
    assert "| a.py | 1 | 1 | 1 | 2 |" in lines
    assert "| all 2 files | 1 | 1 | 2 | 2 |" in lines
    assert "| audio | 2 |" in lines
    assert "| a.py: test_bad | AssertionError: 400 \\| is |" in lines
    assert not any(line.startswith("| b.py") for line in lines)


@pytest.mark.parametrize(
    ("model", "arguments", "reason"),
    [
        ("some/model", ["--uds", "/tmp/x"], "Unix sockets"),
        ("openai/gpt-oss-20b", [], "GPT-OSS"),
        ("some/model", ["--max_model_len", "8192", "--enforce-eager", "--enable-lora"], None),
    ],
)
def test_servers_with_what_vsched_lacks_are_not_started(
    model: str, arguments: list[str], reason: str | None
) -> None:
    """A flag counts if it changes the interface; flags of vLLM's internals are ignored."""
    assert reasons.by_server(model, shim.flags(arguments)) == reason


def test_flags_are_read_in_all_their_forms() -> None:
    """With a space, with an equals sign, with underscores, and as a switch."""
    assert shim.flags(["--a-b", "1", "--c=2", "--d_e", "3", "--switch", "--last"]) == {
        "--a-b": "1",
        "--c": "2",
        "--d-e": "3",
        "--switch": "",
        "--last": "",
    }


def test_files_without_a_server_test_vllm_itself() -> None:
    """A server of the file, or the client of its folder's fixtures, makes a file applicable."""
    assert reasons.starts_server("with RemoteOpenAIServer(m, a) as s:", "")
    assert reasons.starts_server("async def test_a(client: X): ...", "RemoteOpenAIServer")
    assert not reasons.starts_server("def test_a(): client = Mock()", "RemoteOpenAIServer")
    assert not reasons.starts_server("async def test_a(client): ...", "")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The runner's settings for the shim."""
    found: dict[str, Any] = {"context": 2048, "vocabulary": 99}
    found |= {"text": str(tmp_path / "text"), "vision": str(tmp_path / "vision")}
    monkeypatch.setattr(shim, "SETTINGS", found)
    return found


def test_arguments_become_settings(given: dict[str, Any]) -> None:
    """The context is at most the checkpoint's, and -1 log-probabilities are the whole vocabulary."""
    arguments = ["--max-model-len=8192", "--max-num-seqs", "4", "--max-logprobs", "-1"]
    assert set(shim.settings("some/model", arguments, {})[1::2]) == {
        "model.name=some/model",
        "generate.context_tokens=2048",
        "generate.slots=4",
        "server.logprobs_max=99",
        "server.prompt_logprobs_max=4194304",
    }


def test_keys_and_names_become_settings(given: dict[str, Any]) -> None:
    """A vision checkpoint fetches the pictures that the tests serve."""
    arguments = ["--no-enable-prefix-caching", "--served-model-name", "mine"]
    words = shim.settings("Qwen/Qwen2.5-VL-3B", arguments, {"VLLM_API_KEY": "secret"})
    assert {
        "model.name=mine",
        "generate.prefix_cache=false",
        "server.api_key_variable=VLLM_API_KEY",
        'media.hosts=["127.0.0.1:0"]',
    } < set(words[1::2])


@pytest.mark.parametrize(
    "modules", ["mine=/a/b", '{"name": "mine", "path": "/a/b", "base_model_name": "m"}']
)
def test_adapters_prefixes_and_limits_become_settings(given: dict[str, Any], modules: str) -> None:
    arguments = ["--enable-lora", "--lora-modules", modules, "--max-lora-rank", "64"]
    arguments += ["--root-path=/llm", "--enable-force-include-usage"]
    words = shim.settings("m", [*arguments, "--limit-mm-per-prompt", '{"image": 2}'], {})
    assert {
        "adapters.count_max=16",
        "adapters.rank_max=64",
        'adapters.load={"mine" = "/a/b"}',
        "adapters.directory=/",
        "server.root_path=/llm",
        "server.usage_always=true",
        "media.images_max=2",
    } < set(words[1::2])
    sets = [word for word in words[1::2] if word.startswith("adapters.")]
    assert load_config(None, sets=sets, environ={}).config.adapters.load == {"mine": "/a/b"}


def test_an_adapter_is_made_of_the_language_model_at_hand(tmp_path: Path) -> None:
    """Files as PEFT writes them, for the projections of the checkpoint's heads; a vision tower is left alone."""
    from safetensors.numpy import load_file, save_file

    shapes = {"model.layers.0.self_attn.q_proj": (6, 4), "visual.blocks.0.q_proj": (2, 2)}
    shapes["model.layers.0.mlp.up_proj"] = (8, 4)
    weights = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    (tmp_path / "base").mkdir()
    save_file(weights, tmp_path / "base" / "model.safetensors")
    made = adapter.make(tmp_path / "adapter", tmp_path / "base")
    tensors = load_file(made / "adapter_model.safetensors")
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        f"{module}.lora_A.weight": (adapter.RANK, 4),
        f"{module}.lora_B.weight": (6, adapter.RANK),
    }
    config = json.loads((made / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", adapter.RANK)


def test_template_shows_tools_calls_and_reasoning_in_known_forms() -> None:
    """The server recognises its formats, and a conversation with a call is rendered completely."""
    import jinja2

    from vsched.api.tools.formats import (
        CALL_FORMATS,
        REASONING_FORMATS,
        call_format,
        reasoning_format,
    )

    text = (Path(shim.__file__).parent / "tools.jinja").read_text()
    form, reasoning = call_format("auto", text), reasoning_format("auto", text)
    assert form is CALL_FORMATS["hermes"]
    assert reasoning is REASONING_FORMATS["think"]
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]
    reported = jinja2.Template(text).render(
        messages=messages, tools=[{"x": 1}], add_generation_prompt=True
    )
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n' in reported
    assert reported.endswith("42\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
