"""Aggregation of samples to figures, and of figures to tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np
from rich.table import Table

from vsched.bench.load.client import Sample

ERRORS_MAX = 5
NOT_ASKED = "not asked: an earlier turn failed"


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of a duration; milliseconds."""

    p50: float
    p95: float
    p99: float
    mean: float
    worst: float


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the conversations."""

    prompt_tokens: float
    ttft_ms: Times | None
    request_ms: Times | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One case at one concurrency against one server.

    Attributes:
        requests: All planned requests; those not sent because of a failed turn count as failed.
        errors: The most frequent errors, each with its count.
        wrong_length: Number of outputs with another number of tokens than requested.
        wall_s: From the first request to the end of the last.
        requests_s: Successful requests per second.
        ttft_ms: From sending a request to its first text; in `mixed`, of the images.
        itl_ms: Between two pieces of text of one request, which may hold several tokens; in
            `mixed`, of the decoding requests during the burst.
        tpot_ms: From first to last text, divided by the tokens after the first, one value per
            request; in `mixed`, of the decoding requests.
        pieces_mean: Pieces of text per output; fewer than tokens if a server joins tokens or shows
            nothing for one.
        client_cpu: CPU time of the client over wall time: near 1, the client limited the result.
        others: Cores kept busy by other programs meanwhile.
        waiting: Cores kept busy by idle servers of a comparison; None if not measured.
        turns: One entry per turn, for conversations.
    """

    case: str = ""
    concurrency: int = 0
    requests: int
    failed: int
    errors: list[str]
    wrong_length: int
    wall_s: float
    requests_s: float
    output_tokens_s: float
    prompt_tokens_s: float
    prompt_tokens_mean: float
    output_tokens_mean: float
    pieces_mean: float
    ttft_ms: Times | None
    itl_ms: Times | None
    tpot_ms: Times | None
    request_ms: Times | None
    client_cpu: float
    others: float = 0.0
    waiting: float | None = None
    turns: list[TurnFigures] = []


@dataclass(kw_only=True)
class Answers:
    """Samples of one run, before aggregation.

    Attributes:
        sessions: The samples of each session, one per turn.
        tokens: Requested output tokens of each request, in the same order.
        decoders: Sessions that were decoding during a burst; empty for other cases.
        burst: Start and end of the burst, on the clock of the samples.
    """

    sessions: list[list[Sample]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    decoders: range = range(0)
    burst: tuple[float, float] = (0.0, 0.0)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def samples(self) -> list[Sample]:
        """All samples, session by session."""
        return [sample for session in self.sessions for sample in session]


def times(seconds: Iterable[float]) -> Times | None:
    """Summarise durations; None if there are none."""
    values = np.fromiter(seconds, dtype=float) * 1e3
    if not values.size:
        return None
    p50, p95, p99 = (round(float(value), 3) for value in np.percentile(values, [50, 95, 99]))
    mean, worst = round(float(values.mean()), 3), round(float(values.max()), 3)
    return Times(p50=p50, p95=p95, p99=p99, mean=mean, worst=worst)


def gaps(samples: Iterable[Sample], window: tuple[float, float] | None) -> list[float]:
    """Return the times between two pieces of text; with a window, only those that overlap it."""
    return [
        after - before
        for sample in samples
        for before, after in pairwise(sample.stamps)
        if window is None or (after > window[0] and before < window[1])
    ]


def summarise(case: str, concurrency: int, choices: Answers) -> Figures:
    """Summarise one run. A failed request is in no duration and no rate, but is counted with its error."""
    samples = choices.samples
    good = [sample for sample in samples if sample.error is None]
    errors = Counter(sample.error for sample in samples if sample.error is not None)
    wrong = [
        sample
        for sample, tokens in zip(samples, choices.tokens, strict=True)
        if sample.error is None and sample.output_tokens != tokens
    ]
    first, streams, window = good, good, None
    if choices.decoders:
        decoders = {id(sample) for index in choices.decoders for sample in choices.sessions[index]}
        first = [sample for sample in good if id(sample) not in decoders]
        streams = [sample for sample in good if id(sample) in decoders]
        window = choices.burst
    wall_s = max(choices.wall_s, 1e-9)
    return Figures(
        case=case,
        concurrency=concurrency,
        requests=len(samples),
        failed=errors.total(),
        errors=[f"{count} x {text}" for text, count in errors.most_common(ERRORS_MAX)],
        wrong_length=len(wrong),
        wall_s=round(wall_s, 4),
        requests_s=round(len(good) / wall_s, 4),
        output_tokens_s=round(sum(sample.output_tokens for sample in good) / wall_s, 2),
        prompt_tokens_s=round(sum(sample.prompt_tokens for sample in good) / wall_s, 2),
        prompt_tokens_mean=_mean([sample.prompt_tokens for sample in good]),
        output_tokens_mean=_mean([sample.output_tokens for sample in good]),
        pieces_mean=_mean([len(sample.stamps) for sample in good]),
        ttft_ms=_first_text(first),
        itl_ms=times(gaps(streams, window)),
        tpot_ms=times(_per_token(streams)),
        request_ms=_whole(good),
        client_cpu=round(choices.cpu_s / wall_s, 3),
        turns=_turns(choices.sessions),
    )


def _turns(sessions: Sequence[Sequence[Sample]]) -> list[TurnFigures]:
    count = max(map(len, sessions), default=0)
    if count < 2:
        return []
    columns = [
        [session[turn] for session in sessions if len(session) > turn] for turn in range(count)
    ]
    good = [[sample for sample in column if sample.error is None] for column in columns]
    return [
        TurnFigures(
            prompt_tokens=_mean([sample.prompt_tokens for sample in column]),
            ttft_ms=_first_text(column),
            request_ms=_whole(column),
        )
        for column in good
    ]


def _first_text(samples: Iterable[Sample]) -> Times | None:
    return times(sample.stamps[0] - sample.started for sample in samples if sample.stamps)


def _whole(samples: Iterable[Sample]) -> Times | None:
    return times(sample.ended - sample.started for sample in samples)


def _per_token(samples: Iterable[Sample]) -> list[float]:
    return [
        (sample.stamps[-1] - sample.stamps[0]) / (sample.output_tokens - 1)
        for sample in samples
        if sample.stamps and sample.output_tokens > 1
    ]


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / max(len(values), 1), 2)


def _cell(value: Times | None) -> str:
    return "-" if value is None else f"{value.p50:.1f} / {value.p99:.1f}"


def table(results: Sequence[Figures], title: str) -> Table:
    """Return a table of the figures; times are p50 / p99 in milliseconds."""
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
    """Return a table of a conversation by turn."""
    result = Table(title=f"conversation, concurrency {figures.concurrency}", title_justify="left")
    for heading in ("turn", "in tok", "TTFT", "request"):
        result.add_column(heading, justify="right")
    for number, turn in enumerate(figures.turns, 1):
        result.add_row(
            str(number), f"{turn.prompt_tokens:.0f}", _cell(turn.ttft_ms), _cell(turn.request_ms)
        )
    return result
