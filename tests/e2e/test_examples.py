"""Every program of docs/examples runs, the clients against one server."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import runpy
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save_file

from tests.e2e.conftest import SETTINGS
from vsched.api.server import RunningServer, running_server
from vsched.config import load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples"
CHECKPOINT = ROOT / "workers/demo-model"
SERVED = {
    "ask": r"2718\n",
    "stream": r".*\n\d+ prompt, \d+ output tokens\n",
    "images": r"2718 \(0 prompt tokens from the cache\)\n1618 \([1-9]\d+ prompt tokens from the cache\)\n",
    "tools": r"get_weather\(\{'city': '(Paris|Rome)', 'unit': '\w+'\}\) -> \1: 21 degrees \w+\n.*\n",
    "schema": r"\{'colour': '(red|green|blue)', 'count': \d\}\n",
    "lora": r"demo-model: .*\nmine: .*\n",
}
ALONE = {
    "batch": r"[89] of 9 numbers read correctly\n",
    "engine": r"\['.*', '.*'\]\n314\n\{.*'length': [23].*\}\n",
    "policy": r"fifo: median time to first token (\d+) ms\nshort first: median .* (\d+) ms\n",
    "crash": r"no fault: 60 of 60 finished, .* (\d+) ms\ncrash: 60 of 60 finished, .* (\d+) ms\n",
}
"""Expected output, by example."""
TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
CALLS = (
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endif %}"
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def write_adapter(folder: Path) -> None:
    """Write an adapter of one projection of the demo model."""
    folder.mkdir()
    module = "base_model.model.model.language_model.layers.0.self_attn.q_proj"
    draw = np.random.default_rng(0).standard_normal
    sides = {
        f"{module}.lora_A.weight": draw((4, 128)).astype(np.float32),
        f"{module}.lora_B.weight": draw((128, 4)).astype(np.float32),
    }
    save_file(sides, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def write_template(path: Path) -> None:
    """Write the demo model's template with tools."""
    own = (CHECKPOINT / "chat_template.jinja").read_text()
    begin = "<|im_start|>{{ message['role'] }}\n"
    assert begin in own
    path.write_text(TOOLS + own.replace(begin, begin + CALLS))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def example_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("examples")
    write_adapter(folder / "mine")
    write_template(folder / "tools.jinja")
    settings = (
        f"model.path={CHECKPOINT}",
        f"model.chat_template={folder / 'tools.jinja'}",
        "adapters.count_max=1",
        f"adapters.directory={folder}",
    )
    config = load_config(None, sets=[*SETTINGS, *settings], environ={}).config
    async with running_server(config) as server:
        yield server


def run_example(name: str) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", SERVED)
async def test_examples_of_clients_run(
    name: str,
    example_server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{example_server.url}/v1")
    await asyncio.to_thread(run_example, name)
    output = capsys.readouterr().out
    assert re.fullmatch(SERVED[name], output), output


@pytest.mark.parametrize("name", ALONE)
async def test_examples_without_a_server_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(CHECKPOINT)])
    for setting in SETTINGS:
        key, _, value = setting.partition("=")
        monkeypatch.setenv(f"VSCHED__{key.upper().replace('.', '__')}", value)
    await asyncio.to_thread(run_example, name)
    output = capsys.readouterr().out
    found = re.fullmatch(ALONE[name], output)
    assert found, output
    if name == "policy":
        assert int(found[2]) < int(found[1])
    if name == "crash":
        assert int(found[2]) > 3000 > int(found[1])


async def test_examples_are_all_run_and_listed() -> None:
    files = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert files == sorted([*SERVED, *ALONE])
    page = (ROOT / "docs/examples.md").read_text()
    assert sorted(re.findall(r"\]\(examples/(\w+)\.py\)", page)) == files
    assert all(ast.get_docstring(ast.parse((EXAMPLES / f"{one}.py").read_text())) for one in files)
