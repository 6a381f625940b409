"""From samples to figures, and from figures to a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from rich.table import Table

from vsched.bench.load.client import Sample


class Spread(msgspec.Struct, frozen=True):
    """How a time is distributed; milliseconds."""

    p50: float
    p99: float
    mean: float


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the conversations."""

    prompt_tokens: float
    ttft_ms: Spread | None
    request_ms: Spread | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One case at one concurrency.

    Attributes:
        output_tokens_s: Output tokens a second over all requests.
        ttft_ms: From sending a request to its first text.
        itl_ms: Between two pieces of text of one request; a piece may hold several tokens.
        tpot_ms: From first to last text, divided by the tokens after the first; one value a request.
        client_cpu: CPU time of this process over wall time: near 1, the client is what was measured.
        turns: One entry a turn, for conversations.
    """

    case: str
    concurrency: int
    requests: int
    failed: int
    first_error: str | None
    wall_s: float
    requests_s: float
    output_tokens_s: float
    prompt_tokens_s: float
    prompt_tokens_mean: float
    output_tokens_mean: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    request_ms: Spread | None
    client_cpu: float
    turns: list[TurnFigures] = []


def spread(seconds: Sequence[float]) -> Spread | None:
    """Summarise times; None when there are none."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1e3
    p50, p99 = np.percentile(values, [50, 99])
    return Spread(round(float(p50), 3), round(float(p99), 3), round(float(values.mean()), 3))


def _first_text(samples: Sequence[Sample]) -> Spread | None:
    return spread([sample.stamps[0] - sample.started for sample in samples if sample.stamps])


def _whole(samples: Sequence[Sample]) -> Spread | None:
    return spread([sample.ended - sample.started for sample in samples])


def _per_token(sample: Sample) -> float:
    return (sample.stamps[-1] - sample.stamps[0]) / (sample.output_tokens - 1)


def summarise(
    case: str,
    concurrency: int,
    sessions: Sequence[Sequence[Sample]],
    *,
    wall_s: float,
    cpu_s: float,
) -> Figures:
    """Summarise one run; each session is a list of samples, one a turn."""
    samples = [sample for session in sessions for sample in session]
    good = [sample for sample in samples if sample.error is None]
    errors = [sample.error for sample in samples if sample.error is not None]
    output_tokens = sum(sample.output_tokens for sample in good)
    prompt_tokens = sum(sample.prompt_tokens for sample in good)
    turns: list[TurnFigures] = []
    for turn in range(max(map(len, sessions), default=0)):
        column = [s[turn] for s in sessions if len(s) > turn and s[turn].error is None]
        tokens = sum(sample.prompt_tokens for sample in column) / max(len(column), 1)
        figures = TurnFigures(
            prompt_tokens=round(tokens, 1), ttft_ms=_first_text(column), request_ms=_whole(column)
        )
        turns.append(figures)
    gaps = [after - before for sample in good for before, after in pairwise(sample.stamps)]
    per_token = [_per_token(s) for s in good if s.stamps and s.output_tokens > 1]
    return Figures(
        case=case,
        concurrency=concurrency,
        requests=len(samples),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        wall_s=round(wall_s, 3),
        requests_s=round(len(good) / wall_s, 3),
        output_tokens_s=round(output_tokens / wall_s, 1),
        prompt_tokens_s=round(prompt_tokens / wall_s, 1),
        prompt_tokens_mean=round(prompt_tokens / max(len(good), 1), 1),
        output_tokens_mean=round(output_tokens / max(len(good), 1), 1),
        ttft_ms=_first_text(good),
        itl_ms=spread(gaps),
        tpot_ms=spread(per_token),
        request_ms=_whole(good),
        client_cpu=round(cpu_s / wall_s, 3),
        turns=turns if len(turns) > 1 else [],
    )


def _cell(value: Spread | None) -> str:
    return "-" if value is None else f"{value.p50:.1f} / {value.p99:.1f}"


def table(results: Sequence[Figures], title: str) -> Table:
    """Lay the figures out; times are p50 / p99 in milliseconds."""
    result = Table(title=title, caption="times in ms, p50 / p99", title_justify="left")
    result.add_column("case")
    for heading in ("conc.", "requests", "failed", "req/s", "tok/s", "in tok", "out tok"):
        result.add_column(heading, justify="right")
    for heading in ("TTFT", "ITL", "TPOT", "request", "client CPU"):
        result.add_column(heading, justify="right", no_wrap=True)
    for figures in results:
        result.add_row(
            figures.case,
            str(figures.concurrency),
            str(figures.requests),
            str(figures.failed),
            f"{figures.requests_s:.2f}",
            f"{figures.output_tokens_s:.1f}",
            f"{figures.prompt_tokens_mean:.0f}",
            f"{figures.output_tokens_mean:.0f}",
            _cell(figures.ttft_ms),
            _cell(figures.itl_ms),
            _cell(figures.tpot_ms),
            _cell(figures.request_ms),
            f"{figures.client_cpu:.0%}",
        )
    return result


def turns_table(figures: Figures) -> Table:
    """Lay out a conversation turn by turn."""
    result = Table(title=f"conversation, concurrency {figures.concurrency}", title_justify="left")
    for heading in ("turn", "in tok", "TTFT", "request"):
        result.add_column(heading, justify="right")
    for number, turn in enumerate(figures.turns, 1):
        result.add_row(
            str(number), f"{turn.prompt_tokens:.0f}", _cell(turn.ttft_ms), _cell(turn.request_ms)
        )
    return result
