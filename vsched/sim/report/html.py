"""The report of a comparison: one HTML file that holds all it needs, and is read in a minute.

From above to below it answers: who is better, at what, when, and why. The table first; then how long requests took;
then what waited and what was full while they did; then what steps were made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate

from vsched.sim.fast.metrics import Series, SimulationOutcome
from vsched.sim.report.comparison import MEASURES, best, differences, failures
from vsched.sim.report.svg import Chart, Points, colour

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1180px;padding:24px;color:#0f172a}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 4px}p{margin:4px 0;color:#475569}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px;margin:10px 0}
td,th{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid #e2e8f0}
td:first-child,th:first-child{text-align:left}.best{font-weight:700;color:#15803d}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:14px}
svg{width:100%;height:auto;border:1px solid #e2e8f0;border-radius:6px;background:#fff}
svg text{font-family:system-ui,sans-serif;fill:#334155}
.key{display:inline-block;width:12px;height:12px;border-radius:2px;margin:0 5px 0 14px}
code{font-size:13px;background:#f1f5f9;padding:1px 4px;border-radius:3px}
"""
DECODE, PREFILL, ENCODE = "#2563eb", "#f59e0b", "#16a34a"
BARS = ("ttft_ms", "tpot_ms", "e2e_ms")
TITLES = {
    "ttft": "Time to first token",
    "itl": "Between two tokens",
    "tpot": "Time per output token",
    "e2e": "From request to last token",
}


def render_html(outcomes: Sequence[SimulationOutcome]) -> str:
    """Return the report."""
    first = outcomes[0]
    title = " / ".join(outcome.label for outcome in outcomes)
    span = max(outcome.figures.span_s for outcome in outcomes)
    intro = (
        f"{escape(first.workload)}: {first.figures.requests:,} requests over {span:,.0f} simulated "
        f"seconds; cost model {escape(first.cost)}, seed {first.seed}. Targets: first token within "
        f"{first.targets.ttft_ms:,.0f} ms and {first.targets.tpot_ms:,.0f} ms a token."
    )
    sections = [
        f"<h1>{escape(title)}</h1><p>{intro}</p>{_legend(outcomes)}",
        _policies(outcomes),
        _section("Who is better", "Green is best of its row.", [], _table(outcomes)),
        _section(
            "Policy against policy",
            "Milliseconds; less is better. Three bars each: the median, 95 % and 99 % of all requests.",
            [_bars(outcomes, field) for field in BARS],
        ),
        _section(
            "How long requests took",
            "Each line says what share of all was at most so long: further left is better. The axis is logarithmic.",
            [_cdf(outcomes, name) for name in TITLES],
        ),
        _section(
            "While time passed",
            "A queue that grows for good means more load than this configuration bears.",
            _over_time(outcomes),
        ),
        _section(
            "What steps were made of",
            "Mean tokens of a step, over time: blue decodes, orange prefills beside them, green is the encoder's. "
            "Prefill in a step makes everybody who decodes wait for it.",
            _make_up(outcomes),
        ),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(sections)}</body></html>\n"
    )


def _section(title: str, text: str, charts: Sequence[str], before: str = "") -> str:
    drawn = f'<div class="charts">{"".join(charts)}</div>' if charts else ""
    return f"<h2>{title}</h2><p>{text}</p>{before}{drawn}"


def _legend(outcomes: Sequence[SimulationOutcome]) -> str:
    keys = "".join(
        f'<span class="key" style="background:{colour(index)}"></span>{escape(outcome.label)}'
        for index, outcome in enumerate(outcomes)
    )
    return f"<p>{keys}</p>"


def _policies(outcomes: Sequence[SimulationOutcome]) -> str:
    found = differences(outcomes)
    if not found:
        return ""
    head = "".join(f"<th>{escape(outcome.label)}</th>" for outcome in outcomes)
    rows = "".join(
        f"<tr><td>{escape(table)}</td>"
        + "".join(f"<td><code>{escape(policy)}</code></td>" for policy in policies)
        + "</tr>"
        for table, policies in found.items()
    )
    return f"<table><tr><th>policies that differ</th>{head}</tr>{rows}</table>"


def _table(outcomes: Sequence[SimulationOutcome]) -> str:
    head = "".join(f"<th>{escape(outcome.label)}</th>" for outcome in outcomes)
    rows = []
    for measure in MEASURES:
        winners = best(measure, outcomes)
        cells = "".join(
            f"<td{' class=best' if index in winners else ''}>"
            f"{measure.text.format(measure.value(outcome.figures))}</td>"
            for index, outcome in enumerate(outcomes)
        )
        rows.append(f"<tr><td>{measure.name}</td>{cells}</tr>")
        if measure.name == "refused or failed":
            for code in failures(outcomes):
                counts = "".join(
                    f"<td>{one.figures.failed.get(code, 0):,}</td>" for one in outcomes
                )
                rows.append(f"<tr><td>&emsp;{escape(code)}</td>{counts}</tr>")
    digests = "".join(f"<td><code>{one.digest[:12]}</code></td>" for one in outcomes)
    rows.append(f"<tr><td>digest of all decisions</td>{digests}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _bars(outcomes: Sequence[SimulationOutcome], field: str) -> str:
    spreads = [getattr(outcome.figures, field) for outcome in outcomes]
    highest = max(spread.p99 for spread in spreads)
    names = ("p50", "p95", "p99")
    chart = Chart(
        TITLES[field.removesuffix("_ms")],
        x=(0.0, float(len(names))),
        y=(0.0, highest * 1.1),
        x_label="",
        y_label="ms",
        ticks_x=False,
    )
    width = 0.8 / len(outcomes)
    for place, name in enumerate(names):
        chart.label(place + 0.5, name)
        for index, (outcome, spread) in enumerate(zip(outcomes, spreads, strict=True)):
            value = getattr(spread, name)
            label = f"{outcome.label} {name}: {value:,.1f} ms"
            chart.bar(place + 0.1 + index * width, width * 0.92, value, colour(index), label)
            chart.key(colour(index), outcome.label)
    return chart.render()


def _cdf(outcomes: Sequence[SimulationOutcome], name: str) -> str:
    lines = [outcome.cdf[name] for outcome in outcomes]
    values = [value for line in lines for value, _ in line]
    low, high = min(values, default=1.0), max(values, default=10.0)
    chart = Chart(
        TITLES[name], x=(low, high), y=(0.0, 100.0), x_label="ms", y_label="% of all", log_x=True
    )
    targets = outcomes[0].targets
    if name in ("ttft", "tpot"):
        chart.mark(targets.ttft_ms if name == "ttft" else targets.tpot_ms, "target")
    for index, (outcome, line) in enumerate(zip(outcomes, lines, strict=True)):
        chart.line([(value, share * 100) for value, share in line], colour(index), outcome.label)
    return chart.render()


def _times(series: Series) -> list[float]:
    count = len(series.gauges["waiting"])
    return [(index + 1) * series.interval_s for index in range(count)]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Return running means, over as many values before each as the window has."""
    sums = [0.0, *accumulate(values)]
    return [
        (sums[index + 1] - sums[max(index + 1 - window, 0)]) / min(index + 1, window)
        for index in range(len(values))
    ]


def _window(series: Series) -> int:
    return max(len(series.gauges["waiting"]) // 100, 1)


def _over_time(outcomes: Sequence[SimulationOutcome]) -> list[str]:
    def gauge(name: str, factor: float = 1.0) -> list[Points]:
        return [
            list(
                zip(
                    _times(one.series),
                    [value * factor for value in one.series.gauges[name]],
                    strict=True,
                )
            )
            for one in outcomes
        ]

    def busy(name: str, stage: int) -> list[Points]:
        found: list[Points] = []
        for one in outcomes:
            per_ns = 100 / (one.series.interval_s * 1e9) / one.groups[stage]
            values = _smooth(one.series.sums[name], _window(one.series))
            found.append(
                list(zip(_times(one.series), [value * per_ns for value in values], strict=True))
            )
        return found

    return [
        _lines(outcomes, "Requests that wait", gauge("waiting"), "requests"),
        _lines(outcomes, "Requests that run", gauge("running"), "requests"),
        _lines(outcomes, "Images that wait for the encoder", gauge("items_waiting"), "images"),
        _lines(outcomes, "KV cache held", gauge("kv_held", 100), "%"),
        _lines(outcomes, "Embedding pages in use", gauge("pages_used", 100), "%"),
        _lines(outcomes, "Generators busy", busy("generate_busy_ns", 1), "% of the time"),
        _lines(outcomes, "Encoders busy", busy("encode_busy_ns", 0), "% of the time"),
    ]


def _lines(
    outcomes: Sequence[SimulationOutcome],
    title: str,
    lines: Sequence[Points],
    y_label: str,
) -> str:
    end = max((line[-1][0] for line in lines if line), default=1.0)
    highest = max((value for line in lines for _, value in line), default=1.0) * 1.05
    chart = Chart(title, x=(0.0, end), y=(0.0, highest), x_label="simulated s", y_label=y_label)
    for index, line in enumerate(lines):
        if line:
            chart.line(line, colour(index), outcomes[index].label)
    return chart.render()


def _make_up(outcomes: Sequence[SimulationOutcome]) -> list[str]:
    """Draw what steps held: for each outcome its generator's and its encoder's."""
    stacks = []
    for one in outcomes:
        sums, window = one.series.sums, _window(one.series)

        def mean(of: str, by: str) -> list[float]:
            steps = _smooth(sums[by], window)  # noqa: B023 - called before the next turn
            tokens = _smooth(sums[of], window)  # noqa: B023
            return [
                token / step if step else 0.0 for token, step in zip(tokens, steps, strict=True)
            ]

        decode, prefill = mean("decode_tokens", "steps"), mean("prefill_tokens", "steps")
        stacks.append((decode, prefill, mean("encode_tokens", "encode_steps")))
    tallest = max(
        (a + b for decode, prefill, _ in stacks for a, b in zip(decode, prefill, strict=True)),
        default=1.0,
    )
    encoded = max((value for *_, encode in stacks for value in encode), default=1.0)
    charts = []
    for one, (decode, prefill, encode) in zip(outcomes, stacks, strict=True):
        times = _times(one.series)
        end = times[-1] if times else 1.0
        zero = [(at, 0.0) for at in times]
        lower = list(zip(times, decode, strict=True))
        upper = [(at, a + b) for at, a, b in zip(times, decode, prefill, strict=True)]
        axes = {"x": (0.0, end), "x_label": "simulated s", "y_label": "tokens a step"}
        chart = Chart(f"{one.label}: generator steps", y=(0.0, tallest * 1.05), **axes)  # type: ignore[arg-type]
        chart.area(lower, zero, DECODE, "decode")
        chart.area(upper, lower, PREFILL, "prefill")
        charts.append(chart.render())
        chart = Chart(f"{one.label}: encoder steps", y=(0.0, encoded * 1.05), **axes)  # type: ignore[arg-type]
        chart.area(list(zip(times, encode, strict=True)), zero, ENCODE, "image tokens")
        charts.append(chart.render())
    return charts
