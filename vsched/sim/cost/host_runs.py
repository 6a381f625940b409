"""Fit a cost model to a run of another host, such as vLLM, from the file that `HostRecorder` writes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import msgspec

from vsched.errors import ConfigError
from vsched.sim.cost.model import (
    CostModel,
    EncodeCost,
    GenerateCost,
    GenerateSample,
    HostCost,
    fit_linear,
)
from vsched.sim.workload.host_traces import HostRequest, HostStep, RunHeader, RunLine

STEPS_MIN = 50
"""Minimum number of steps for a fit."""


class HostRunFile(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of a run."""

    header: RunHeader
    steps: tuple[HostStep, ...]
    requests: tuple[HostRequest, ...]

    def ttft_ms(self) -> dict[str, list[float]]:
        """Return sorted times to first token by tenant, and of all requests under an empty name."""
        found: dict[str, list[float]] = defaultdict(list)
        for one in self.requests:
            for name in {"", one.tenant}:
                found[name].append(one.ttft_ns / 1e6)
        return {name: sorted(times) for name, times in sorted(found.items())}


def read_run(path: Path) -> HostRunFile:
    """Read a run.

    Raises:
        ConfigError: If the file cannot be read, or is not a run with enough steps.
    """
    decode = msgspec.json.Decoder(RunLine).decode
    try:
        lines = [decode(line) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: not a run ({error}). Remedy: name the file .run next to a trace"
        ) from error
    steps = tuple([one for one in lines if isinstance(one, HostStep) and one.busy_ns > 0])
    if not lines or not isinstance(lines[0], RunHeader) or len(steps) < STEPS_MIN:
        raise ConfigError(
            f"{path}: {len(steps)} steps, too few for a fit. Remedy: record at least {STEPS_MIN}"
        )
    requests = tuple([one for one in lines if isinstance(one, HostRequest)])
    return HostRunFile(header=lines[0], steps=steps, requests=requests)


def fit_run(run: HostRunFile, base: CostModel, *, name: str) -> CostModel:
    """Fit the steps of a run; the shape of the model is that of `base`.

    Encoding is part of the steps, and has no further cost.
    """
    samples = [
        GenerateSample(
            decodes=one.decodes,
            context=one.context_tokens,
            prefill=one.prefill_tokens,
            pairs=one.pairs,
            ns=one.busy_ns,
        )
        for one in run.steps
        if one.decodes or one.prefill_tokens
    ]
    rows = [(1.0, one.decodes, one.context, one.prefill, one.pairs) for one in samples]
    costs, error = fit_linear(rows, [one.ns for one in samples])
    usual_ns = statistics.median(one.busy_ns for one in run.steps)
    gaps = [
        after.ended_ns - after.busy_ns - before.ended_ns for before, after in pairwise(run.steps)
    ]
    gaps = [gap for gap in gaps if 0 <= gap < usual_ns]  # a longer one is an idle host
    return msgspec.structs.replace(
        base,
        name=name,
        source=f"{len(samples)} steps of {run.header.host}",
        encode=EncodeCost(),
        generate=GenerateCost(**dict(zip(GenerateCost.__struct_fields__, costs, strict=True))),
        host=HostCost(gap_ns=statistics.median(gaps) if gaps else 0.0),
        kv_tokens=run.header.kv_tokens,
        encode_error=None,
        generate_error=error,
        noise=0.0,
        machine=None,
    )
