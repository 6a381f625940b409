"""guidellm: a synchronous and a concurrent benchmark; its counts must match the requests."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.clients import asked

REQUESTS, OUTPUT_TOKENS = 8, 16


def benchmark(profile: str) -> dict[str, Any]:
    """Run one; return its report."""
    with tempfile.TemporaryDirectory(prefix="vsched-guidellm-") as folder:
        report = Path(folder) / "report.json"
        target = asked.URL.removesuffix("/v1")
        asked.run(
            *("guidellm", "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={target},model={asked.MODEL}"),
            *("--tokenizer", f"kind=hf_auto,model={asked.CHECKPOINT}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}"),
            *("--profile", profile, "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--output", f"kind=json,path={report}"),
        )
        found: dict[str, Any] = json.loads(report.read_text())["benchmarks"][0]
    return found


def check(found: dict[str, Any]) -> None:
    """Fail unless every request succeeded with its number of tokens, and inter-token times were measured."""
    metrics = found["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] == totals["total"] == REQUESTS, totals
    tokens = metrics["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == OUTPUT_TOKENS, tokens
    assert metrics["inter_token_latency_ms"]["successful"]["min"] > 0


def check_synchronous() -> None:
    check(benchmark("kind=synchronous"))


def check_concurrent() -> None:
    check(benchmark("kind=concurrent,streams=4"))
