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
    HostCost,
    fit_linear,
    fit_totals,
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

    A step with images encodes them before its tokens; in a simulation with `placement = "together"`, that is a step of
    its own. Preparation is the time until the scheduler has a request, at its least: a step that runs can delay it.
    """
    steps = [one for one in run.steps if one.decodes or one.prefill_tokens]
    rows = [
        (
            *(1.0, one.decodes, one.context_tokens, one.prefill_tokens, one.pairs),
            *(one.images, one.image_tokens, one.image_pairs),
        )
        for one in steps
    ]
    costs, error = fit_totals(rows, [one.busy_ns for one in steps])
    step_ns, decode_ns, context_ns, prefill_ns, pair_ns, *of_images = costs
    item_ns, token_ns, token_pair_ns = of_images
    request_ns, prompt_token_ns = _preparation(run)
    usual_ns = statistics.median(one.busy_ns for one in run.steps)
    gaps = [
        after.ended_ns - after.busy_ns - before.ended_ns for before, after in pairwise(run.steps)
    ]
    gaps = [gap for gap in gaps if 0 <= gap < usual_ns]  # a longer one is an idle host
    return msgspec.structs.replace(
        base,
        name=name,
        source=f"{len(steps)} steps of {run.header.host}",
        encode=EncodeCost(item_ns=item_ns, token_ns=token_ns, token_pair_ns=token_pair_ns),
        generate=GenerateCost(
            step_ns=step_ns,
            decode_ns=decode_ns,
            context_ns=context_ns,
            prefill_ns=prefill_ns,
            pair_ns=pair_ns,
        ),
        host=HostCost(
            gap_ns=statistics.fmean(gaps) if gaps else 0.0,
            request_ns=request_ns,
            token_ns=prompt_token_ns,
            depth=run.header.depth,
        ),
        kv_tokens=run.header.kv_tokens,
        encode_error=None,
        generate_error=error,
        noise=0.0,
        machine=None,
    )


def simulated_settings(run: HostRunFile) -> list[str]:
    """Return the assignments of `--set` with which a simulation has the limits of the host."""
    header = run.header
    settings = {
        "slots": header.slots,
        "max_batch_tokens": header.batch_tokens,
        "chunk_tokens": header.batch_tokens,
        "block_size": header.block_size,
        "step_target_ms": f"{header.step_target_ms:g}",
        "prefix_cache": str(header.prefix_cache).lower(),
    }
    sets = [f"generate.{key}={value}" for key, value in settings.items()]
    if any(one.images for one in run.steps):
        sets.append("placement=together")
    return sets


def _preparation(run: HostRunFile) -> tuple[float, float]:
    """Return the time of preparing a request, and of each of its prompt tokens."""
    requests = [one for one in run.requests if one.prepared_ns > 0]
    if not requests:
        return 0.0, 0.0
    rows = [(1.0, one.prompt_tokens) for one in requests]
    (request_ns, token_ns), _ = fit_linear(rows, [one.prepared_ns for one in requests])
    return request_ns, token_ns
