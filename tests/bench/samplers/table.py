"""Comparison of samplers: milliseconds of CPU time per step on one core."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from tests.bench.parts.sampler.measure import KINDS, SamplerRow, draw_logits, measure_sampler
from tests.bench.report.tables import markdown
from tests.bench.servers import sides
from tests.bench.servers.peers import OFFLINE, PEERS
from tests.bench.sessions import machine, publish
from vsched.errors import ConfigError
from vsched_workers.plugin import TransformersPlugin

ROWS = (1, 8, 64)
CASES: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top-k 20": {"top_k": 20},
    "top-p 0.95": {"top_p": 0.95},
    "top-p 0.95, penalties": {
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
}
"""Temperature 1 unless given."""
NAMES = ("vllm", "llamacpp")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def samplers(options: argparse.Namespace, console: Console) -> None:
    """Measure the sampler of vsched, then each peer's with the same logits, and write a table."""
    versions = {name: PEERS[name].version(_folder(options, name)) for name in NAMES}
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[SamplerRow]] = {}
    with console.status("the sampler of vsched"):
        found[sides.VSCHED] = measure_sampler(
            functools.partial(TransformersPlugin().sampler, dtype="bfloat16"),
            vocabulary=options.vocabulary,
            rows=ROWS,
            repeats=options.repeats,
            cases=CASES,
        )
    with tempfile.TemporaryDirectory() as work:
        job = write_job(Path(work), options.vocabulary, options.repeats)
        for name in NAMES:
            with console.status(f"the sampler of {name}"):
                found[name] = _measure(name, _folder(options, name), job, Path(work))
    about = (
        f"{machine()};\nvsched {sides.described(sides.ROOT)}, {', '.join(versions.values())};\n"
        f"{options.vocabulary:,} tokens; load {os.getloadavg()[0]:.1f}."
    )
    publish(options, "samplers", [table(found), about], {}, console)


def write_job(folder: Path, vocabulary: int, repeats: int) -> dict[str, Any]:
    """Write the logits measured with vsched; return a job over them."""
    logits: list[tuple[str, int, str]] = []
    for kind in KINDS:
        for count in ROWS:
            file = folder / f"{kind}-{count}.npy"
            np.save(file, draw_logits(kind, count, vocabulary))
            logits.append((kind, count, str(file)))
    return {"repeats": repeats, "cases": CASES, "logits": logits}


def _folder(options: argparse.Namespace, name: str) -> Path:
    found: Path = (options.peers / name).absolute()
    return found


def _measure(name: str, folder: Path, job: dict[str, Any], work: Path) -> list[SamplerRow]:
    """Run a peer's program in its environment.

    Raises:
        ConfigError: When it fails.
    """
    requested, out = work / f"{name}.json", work / f"{name}-figures.json"
    library = str(folder / "build" / "bin" / "libllama.so")
    requested.write_bytes(msgspec.json.encode({**job, "library": library}))
    program = f"tests.bench.samplers.{name}"
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-m", program, str(requested), str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=sides.ROOT,
        env={**os.environ, **OFFLINE, **ENVIRONMENT, "PYTHONPATH": str(sides.ROOT)},
    )
    if done.returncode:
        raise ConfigError(f"the sampler of {name} could not be measured:\n{done.stderr[-2000:]}")
    return read(out.read_bytes())


def read(content: bytes) -> list[SamplerRow]:
    """Return the rows written by a program."""
    return msgspec.json.decode(content, type=dict[str, list[SamplerRow]])["rows"]


def table(found: Mapping[str, Sequence[SamplerRow]]) -> str:
    """Return a line for each case and a column for each side: median (minimum to maximum)."""
    cells: dict[tuple[str, str, int], dict[str, str]] = {}
    for side, rows in found.items():
        for row in rows:
            low, high = row.spread_ms
            text = f"{row.step_ms:.2f} ({low:.2f}-{high:.2f})"
            cells.setdefault((row.requested, row.logits, row.rows), {})[side] = text
    head = ["requested", "logits", "rows", *found]
    lines = [
        [requested, logits, str(count), *(sides_.get(side, "-") for side in found)]
        for (requested, logits, count), sides_ in sorted(
            cells.items(), key=lambda one: (list(CASES).index(one[0][0]), one[0][1:])
        )
    ]
    return markdown(head, lines)
