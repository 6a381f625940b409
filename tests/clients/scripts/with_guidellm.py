"""guidellm: a synchronous benchmark and one with several at a time; what it counts must be what was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients import asked

OUTPUT_TOKENS = 16


def benchmark(*words: str) -> dict[str, Any]:
    """Run one; return its report."""
    with tempfile.TemporaryDirectory(prefix="vsched-guidellm-") as folder:
        command = [
            *(str(Path(sys.executable).parent / "guidellm"), "benchmark", "run"),
            *("--target", asked.URL.removesuffix("/v1"), "--model", asked.MODEL),
            *("--processor", asked.CHECKPOINT, "--max-requests", "8"),
            *("--data", f"prompt_tokens=64,output_tokens={OUTPUT_TOKENS}"),
            *("--output-dir", folder, "--outputs", "json", *words),
        ]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        (report,) = Path(folder).glob("*.json")
        found: dict[str, Any] = json.loads(report.read_text())["benchmarks"][0]
    return found


def check(found: dict[str, Any]) -> None:
    """Fail unless every request succeeded with the tokens asked for, and times between them were seen."""
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] == totals["total"] == 8, totals
    tokens = metrics["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == OUTPUT_TOKENS, tokens
    assert metrics["inter_token_latency_ms"]["successful"]["min"] > 0


def check_synchronous() -> None:
    check(benchmark("--profile", "synchronous"))


def check_concurrent() -> None:
    check(benchmark("--profile", "concurrent", "--rate", "4"))
