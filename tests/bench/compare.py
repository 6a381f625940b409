"""Compare a vsched server with another OpenAI-compatible one, interleaved in one run.

    python tests/bench/compare.py --vsched http://127.0.0.1:8000 --peer http://127.0.0.1:8201 --peer-model m

Both servers must be up, with equal threads. The runs alternate (A, B, A, B, …), so that a noisy neighbour hits both.
What is reported is the ratio of each pair, its median, and its spread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from pathlib import Path

from vsched.bench.client import BenchClient
from vsched.bench.serve import Load, default_sessions, run_load
from vsched.bench.shapes import Case, shape_of
from vsched.bench.summary import Figures


async def measure(url: str, model: str, arguments: argparse.Namespace, repeat: int) -> Figures:
    """Run the case once against one server."""
    case = Case(arguments.case)
    shape = shape_of(case, words=None, output_tokens=None, image_pixels=448, turns=8)
    client = BenchClient(url, api_key="", timeout_s=900)
    load = Load(
        case=case,
        shape=shape,
        concurrency=arguments.concurrency,
        sessions=arguments.sessions or default_sessions(case, arguments.concurrency),
        model=model,
        seed=repeat,
        fixed_length=False,  # peers do not know min_tokens; greedy answers are equally long anyway
    )
    return await run_load(client, load, lambda: None)


async def compare(arguments: argparse.Namespace) -> dict[str, object]:
    """Alternate between the servers and return all figures and the ratios."""
    rows: list[dict[str, float]] = []
    for repeat in range(arguments.repeats):
        ours = await measure(arguments.vsched, arguments.model, arguments, repeat)
        peer = await measure(arguments.peer, arguments.peer_model, arguments, repeat)
        for name, figures in (("vsched", ours), ("peer", peer)):
            if figures.failed:
                sys.exit(f"{name}: {figures.failed} requests failed: {figures.first_error}")
        rows.append(
            {
                "vsched_requests_s": round(ours.requests_s, 3),
                "peer_requests_s": round(peer.requests_s, 3),
                "ratio": round(ours.requests_s / peer.requests_s, 2),
                "vsched_output_tokens": ours.output_tokens_mean,
                "peer_output_tokens": peer.output_tokens_mean,
            }
        )
        print(f"repeat {repeat + 1}: {rows[-1]}", flush=True)
    ratios = [row["ratio"] for row in rows]
    return {
        "case": arguments.case,
        "concurrency": arguments.concurrency,
        "rows": rows,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Read the command line, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--vsched", required=True)
    parser.add_argument("--model", default="tiny25")
    parser.add_argument("--peer", required=True)
    parser.add_argument("--peer-model", required=True)
    parser.add_argument("--case", choices=[case.value for case in Case], default="image")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = asyncio.run(compare(arguments))
    print(json.dumps({key: report[key] for key in report if key != "rows"}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
