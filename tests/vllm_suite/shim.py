"""A pytest plug-in in the process of vLLM's tests: servers are vsched's, models the checkpoints at hand.

It is copied beside vLLM's tests, whose package is named `tests` as well, so it imports nothing of the repository but
its neighbour.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from typing import Any

import pytest

from . import reasons

SETTINGS: dict[str, Any] = json.loads(os.environ.get("VSCHED_SUITE", "{}"))
READY_S = 120.0
STOP_S = 20.0


def checkpoint(model: str) -> str:
    """Return the folder that is served for a model's name."""
    return str(SETTINGS["vision" if "VL" in model or "vision" in model.lower() else "text"])


def settings(model: str, arguments: list[str]) -> list[str]:
    """Translate the arguments of `vllm serve` that vsched knows into `--set`; others are vLLM's own affair."""
    found = {"model.name": model}
    keys = {
        "--max-model-len": "generate.context_tokens",
        "--max-num-seqs": "generate.slots",
        "--max-logprobs": "server.logprobs_max",
        "--served-model-name": "model.name",
    }
    words = [word for argument in arguments for word in argument.split("=", 1)]
    for flag, value in itertools.pairwise(words):
        if flag in keys:
            found[keys[flag]] = value
    context = int(found.get("generate.context_tokens", 0))
    found["generate.context_tokens"] = str(min(context, SETTINGS["context"]))
    if int(found.get("server.logprobs_max", 1)) < 1:
        found["server.logprobs_max"] = str(SETTINGS["vocabulary"])
    return [word for key, value in found.items() for word in ("--set", f"{key}={value}")]


def make_server(base: type) -> type:
    """Make the class that tests start servers with, from that of vLLM, whose clients it keeps."""

    class RemoteOpenAIServer(base):  # type: ignore[misc]
        def __init__(self, model: str, vllm_serve_args: list[str], **options: object) -> None:
            arguments = list(vllm_serve_args)
            if reason := reasons.by_flags(arguments):
                pytest.skip(f"not applicable: {reason}")
            self.host, self.uds, self.show_hidden_metrics = "127.0.0.1", None, False
            with socket.socket() as free:
                free.bind((self.host, 0))
                self.port = free.getsockname()[1]
            command = [
                *SETTINGS["command"],
                checkpoint(model),
                "--port",
                str(self.port),
                *SETTINGS["arguments"],
            ]
            self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the server
            self.proc = subprocess.Popen(
                [*command, *settings(model, arguments)],
                env={**os.environ, **SETTINGS["environment"]},
                stdout=self.log,
                stderr=self.log,
            )
            self._wait()

        def _wait(self) -> None:
            end = time.monotonic() + READY_S
            while self.proc.poll() is None and time.monotonic() < end:
                try:
                    urllib.request.urlopen(
                        f"http://{self.host}:{self.port}/health", timeout=5
                    ).close()
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


def pytest_configure(config: pytest.Config) -> None:
    """Put vsched in front before the first test file is imported."""
    if not SETTINGS:
        return
    utilities: Any = importlib.import_module("tests.utils")
    utilities.RemoteOpenAIServer = make_server(utilities.RemoteOpenAIServer)
    transformers = importlib.import_module("transformers")
    known = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(name: str, *positional: object, **options: object) -> object:
        folder = name if os.path.isdir(name) else checkpoint(str(name))
        return known(folder, *positional, **options)

    transformers.AutoTokenizer.from_pretrained = from_pretrained


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is about something else."""
    for item in items:
        if reason := reasons.by_test(item.nodeid.lower()):
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {reason}"))
