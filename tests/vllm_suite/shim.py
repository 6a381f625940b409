"""A pytest plug-in in the process of vLLM's tests: servers are vsched's, models the given checkpoints.

It is copied next to vLLM's tests, whose package is named `tests` as well, so it imports nothing of the repository but
its neighbours.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import re
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from . import pictures, reasons

SETTINGS: dict[str, Any] = json.loads(os.environ.get("VSCHED_SUITE", "{}"))
READY_S = 280.0
ADAPTERS_MAX = 16
STOP_S = 20.0
SERVER = "RemoteOpenAIServer"
VISION = re.compile(r"VL|[Vv]ision|[Ll]lava")
ADAPTER = re.compile(r"(?i)lora|self_cognition")


def checkpoint(model: str) -> str:
    """Return the folder that is served for a model's name."""
    if os.path.isdir(model):
        return model
    return str(SETTINGS["vision" if VISION.search(model) else "text"])


def flags(arguments: list[str]) -> dict[str, str]:
    """Read the arguments of `vllm serve`: the value of each flag, empty for a switch."""
    words: list[str] = []
    for argument in arguments:
        words += argument.split("=", 1) if argument.startswith("--") else [argument]
    found: dict[str, str] = {}
    for word, value in itertools.pairwise([*words, "--"]):
        if word.startswith("--"):
            found[word.replace("_", "-")] = "" if value.startswith("--") else value
    return found


def settings(model: str, arguments: list[str], environment: dict[str, str]) -> list[str]:
    """Translate the arguments that vsched knows into `--set`; others concern vLLM's internals."""
    asked = flags(arguments)
    found = {"model.name": asked.get("--served-model-name", model)}
    keys = {
        "--max-model-len": "generate.context_tokens",
        "--max-num-seqs": "generate.slots",
        "--max-logprobs": "server.logprobs_max",
        "--root-path": "server.root_path",
    }
    found |= {key: asked[flag] for flag, key in keys.items() if flag in asked}
    context = int(found.get("generate.context_tokens", 0))
    found["generate.context_tokens"] = str(min(context, SETTINGS["context"]))
    if "server.logprobs_max" in found:
        found["server.prompt_logprobs_max"] = str(1 << 22)
        if int(found["server.logprobs_max"]) < 1:
            found["server.logprobs_max"] = str(SETTINGS["vocabulary"])
    if "VLLM_API_KEY" in environment:
        found["server.api_key_variable"] = "VLLM_API_KEY"
    if "--no-enable-prefix-caching" in asked:
        found["generate.prefix_cache"] = "false"
    if "--limit-mm-per-prompt" in asked:
        images = json.loads(asked["--limit-mm-per-prompt"]).get("image", 1)
        found["media.images_max"] = str(images)
    if "--enable-force-include-usage" in asked:
        found["server.usage_always"] = "true"
    if "--enable-lora" in asked:
        found |= {
            "adapters.count_max": str(ADAPTERS_MAX),
            "adapters.rank_max": asked.get("--max-lora-rank", "16"),
            "adapters.load": adapters(asked.get("--lora-modules", "")),
            "adapters.directory": "/",
        }
    if checkpoint(model) == SETTINGS["vision"]:
        host = json.dumps([f"127.0.0.1:{pictures.PORT}"])
        found |= {"media.hosts": host, "media.private_hosts": host}
    return [word for key, value in found.items() for word in ("--set", f"{key}={value}")]


def adapters(modules: str) -> str:
    """Translate `name=path`, or the same in JSON."""
    if modules.startswith("{"):
        module = json.loads(modules)
        name, path = module["name"], module["path"]
    else:
        name, _, path = modules.partition("=")
    return f"{{{json.dumps(name)} = {json.dumps(path)}}}" if name else "{}"


def make_server(base: type) -> type:
    """Derive the class with which tests start servers from vLLM's, whose clients it keeps."""

    class RemoteOpenAIServer(base):  # type: ignore[misc]
        def __init__(
            self,
            model: str,
            vllm_serve_args: list[str],
            *,
            env_dict: dict[str, str] | None = None,
            **options: object,
        ) -> None:
            arguments, environment = list(vllm_serve_args), dict(env_dict or {})
            asked = flags(arguments)
            if reason := reasons.by_server(model, asked):
                pytest.skip(f"not applicable: {reason}")
            if "--api-key" in asked:
                environment["VLLM_API_KEY"] = asked["--api-key"]
            self.host, self.uds, self.show_hidden_metrics = "127.0.0.1", None, False
            self.port = free_port()
            command = [*SETTINGS["command"], checkpoint(model), "--port", str(self.port)]
            command += [*SETTINGS["arguments"], *settings(model, arguments, environment)]
            self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the server
            self.proc = subprocess.Popen(
                command,
                env={**os.environ, **environment, **SETTINGS["environment"]},
                stdout=self.log,
                stderr=self.log,
            )
            self._wait()

        def _wait(self) -> None:
            end = time.monotonic() + READY_S
            while self.proc.poll() is None and time.monotonic() < end:
                try:
                    urllib.request.urlopen(self.url_for("health"), timeout=5).close()
                except OSError:
                    time.sleep(0.2)
                else:
                    return
            self._shutdown()
            self.log.seek(0)
            raise RuntimeError("the server did not start: " + self.log.read().decode()[-2000:])

        def _shutdown(self) -> None:
            self.proc.terminate()
            try:
                self.proc.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                self.proc.wait()

    return RemoteOpenAIServer


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Hub:
    """The model hub of vLLM's tests: returns the given checkpoint or adapter for any name."""

    def snapshot_download(self, repo_id: str, **_: object) -> str:
        """Return the folder of a model, or of an adapter."""
        return str(SETTINGS["adapter"]) if ADAPTER.search(repo_id) else checkpoint(repo_id)


class ModelConfig:
    """The part of vLLM's model configuration that tests use."""

    def __init__(self, model: str, **_: object) -> None:
        self.folder = checkpoint(model)

    def get_vocab_size(self) -> int:
        """Return the number of token ids."""
        config = json.loads((Path(self.folder) / "config.json").read_text())
        return int(config.get("text_config", config)["vocab_size"])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replace vLLM's servers and models before the first test file or its fixtures are imported."""
    utilities: Any = importlib.import_module("tests.utils")
    utilities.RemoteOpenAIServer = make_server(utilities.RemoteOpenAIServer)
    transformers = importlib.import_module("transformers")
    known = transformers.AutoTokenizer.from_pretrained

    def tokenizer(name: str = "", tokenizer_name: str = "", **_: object) -> object:
        return known(checkpoint(str(name or tokenizer_name)))

    transformers.AutoTokenizer.from_pretrained = tokenizer
    for module, name, value in (
        ("vllm.tokenizers", "get_tokenizer", tokenizer),
        ("vllm.config", "ModelConfig", ModelConfig),
        ("vllm.transformers_utils.repo_utils", "hf_api", Hub),
        (
            "vllm.model_executor.model_loader.weight_utils",
            "download_weights_from_hf",
            lambda name, **_: checkpoint(name),
        ),
        ("vllm.assets.image", "get_vllm_public_assets", pictures.draw),
        ("tests.conftest", "_find_free_port", lambda: pictures.PORT),
        ("tests.conftest", "cleanup_dist_env_and_memory", lambda: None),  # no engine ran here
    ):
        setattr(importlib.import_module(module), name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = reasons.by_test(item.nodeid.lower())
        reason = own if asks_server(item) else reasons.INTERNALS
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {reason}"))


def asks_server(item: pytest.Item) -> bool:
    """Return True if a test, or a fixture that it uses, starts a server."""
    information: Any = getattr(item, "_fixtureinfo", None)
    definitions = information.name2fixturedefs.values() if information else ()
    functions = [
        getattr(item, "function", None),
        *(one.func for many in definitions for one in many),
    ]
    sources = [inspect.getsource(function) for function in functions if function is not None]
    return any(f"{SERVER}(" in source or "getfixturevalue(" in source for source in sources)


OUTCOMES: list[dict[str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of a test, or of its set-up if that failed."""
    if report.when == "call" or not report.passed:
        note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Record a file that could not be imported."""
    if report.failed:
        note(report)
        write(report.nodeid)


def note(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Keep an outcome until its file ends."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    name = report.nodeid.partition("::")[2] or "all"
    message = crash.message if crash else text[-2000:]
    outcome = {"test": name, "outcome": report.outcome, "message": message, "text": text[-20000:]}
    OUTCOMES[:] = [other for other in OUTCOMES if other["test"] != name]
    OUTCOMES.append(outcome)
    if report.failed:
        print(f"\n{message[:1000]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Write a file's outcomes after its last test, so that an interrupted run resumes with a file."""
    result = yield
    file = item.nodeid.partition("::")[0]
    if nextitem is None or nextitem.nodeid.partition("::")[0] != file:
        write(file)
    return result


def write(file: str) -> None:
    """Append a file's outcomes to the report."""
    with Path(SETTINGS["report"]).open("a") as report:
        report.write(json.dumps({"file": file, "outcomes": OUTCOMES}) + "\n")
    OUTCOMES.clear()
