"""The sampler of vLLM's CPU path, rewritten in torch, compared with `python -m tests.bench.parts sampler`.

    python -m tests.bench.torch_sampler

It is not vLLM itself: one sort of all logits for top-k and top-p, a softmax, and the argmin of
exponential variables, as in `vllm/v1/sample/ops/topk_topp_sampler.py` without FlashInfer. Only
cases without history are included.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from tests.bench.parts.sampler.measure import ASKED, Choose, SamplerRow, measure_sampler
from vsched.worker.contract import SequenceState
from vsched_workers.plugin import TransformersPlugin

CASES = {name: fields for name, fields in ASKED.items() if name not in {"penalties", "all"}}


def make_torch_sampler(logits: npt.NDArray[np.float32]) -> Choose:
    """Return a sampler over bfloat16 logits."""
    given = torch.from_numpy(logits).to(torch.bfloat16)

    def choose(special: Sequence[tuple[int, SequenceState]]) -> npt.NDArray[np.int32]:
        values = given.float()
        found: torch.Tensor = values.argmax(dim=-1)
        if special:
            params = special[0][1].sampling
            values = values.div_(params.temperature)
            if params.min_p > 0.0:
                probabilities = values.softmax(dim=-1)
                least = probabilities.amax(dim=-1, keepdim=True) * params.min_p
                values.masked_fill_(probabilities < least, -torch.inf)
            values = cut(values, params.top_k, params.top_p)
            noise = torch.empty_like(values).exponential_()
            found = values.softmax(dim=-1).div_(noise).argmax(dim=-1)
        return found.int().numpy()

    return choose


def cut(values: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return logits with -inf for tokens excluded by top-k and top-p."""
    if not top_k and top_p >= 1.0:
        return values
    ordered, places = values.sort(dim=-1)
    if top_k:
        ordered.masked_fill_(ordered < ordered[:, -top_k, None], -torch.inf)
    if top_p < 1.0:
        below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
        below[:, -1] = False
        ordered.masked_fill_(below, -torch.inf)
    return ordered.scatter_(dim=-1, index=places, src=ordered.clone())


def main() -> None:
    """Measure both, one after another for each number of rows, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.torch_sampler")
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    sizes = {"vocabulary": options.vocabulary, "repeats": options.repeats, "cases": CASES}
    makers = functools.partial(TransformersPlugin().sampler, dtype="bfloat16"), make_torch_sampler
    table = Table("logits", "rows", "asked", "vsched", "torch, vLLM's steps")
    for rows in (1, 8, 64):
        ours, theirs = (measure_sampler(make, rows=[rows], **sizes) for make in makers)
        for one, other in zip(ours, theirs, strict=True):
            table.add_row(one.logits, str(rows), one.requested, _text(one), _text(other))
    Console(width=100).print(table)


def _text(row: SamplerRow) -> str:
    return "{:.2f} ({:.2f}-{:.2f})".format(row.step_ms, *row.spread_ms)


if __name__ == "__main__":
    main()
