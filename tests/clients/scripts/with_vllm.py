"""`vllm bench serve`: chats and completions; its counts must match the requests."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.clients import asked

COMMAND = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The entry point of `vllm bench serve`, without importing the server."""
PROMPTS, OUTPUT_TOKENS = 8, 16


def bench(backend: str, endpoint: str) -> dict[str, Any]:
    """Run it; return its report."""
    with tempfile.TemporaryDirectory(prefix="vsched-vllm-") as folder:
        asked.run(
            *("python", "-c", COMMAND, "--backend", backend, "--endpoint", endpoint),
            *("--base-url", asked.URL.removesuffix("/v1"), "--model", asked.MODEL),
            *("--tokenizer", asked.CHECKPOINT, "--dataset-name", "random", "--ignore-eos"),
            *("--random-input-len", "64", "--random-output-len", str(OUTPUT_TOKENS)),
            *("--num-prompts", str(PROMPTS), "--max-concurrency", "4"),
            *("--save-result", "--result-dir", folder, "--result-filename", "report.json"),
        )
        found: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text())
    return found


def check(found: dict[str, Any]) -> None:
    """Fail unless every request succeeded with its number of tokens, and inter-token times were measured."""
    assert found["completed"] == PROMPTS, found
    assert found["total_output_tokens"] == PROMPTS * OUTPUT_TOKENS, found
    assert found["mean_itl_ms"] > 0, found


def check_chat() -> None:
    check(bench("openai-chat", "/v1/chat/completions"))


def check_completions() -> None:
    check(bench("openai", "/v1/completions"))
