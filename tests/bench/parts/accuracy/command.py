"""`python -m tests.bench.parts accuracy`: one held-out question set under every setting.

Only an image token limit may change an answer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.errors import ConfigError
from vsched.terminal.options import JsonOption, PlotOption, SetOption, new_figure, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from tests.bench.parts.accuracy.measure import AccuracyReport, VariantResult
    from tests.bench.parts.accuracy.variants import Variant
    from vsched.checkpoint_tools import CheckpointTools

CHANGES_SHOWN = 5
SHOWN_CHARACTERS = 24
PIPE_COLUMNS = 200
"""Width of the table if standard output is no terminal."""


def accuracy(
    checkpoint: Annotated[
        str,
        typer.Argument(help="Folder of the checkpoint; the trained one of the repository."),
    ] = "",
    assignments: SetOption = None,
    count: Annotated[int, typer.Option(min=1, help="Conversations per task.")] = 100,
    clients: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 32,
    budgets: Annotated[
        str, typer.Option(help="Image token limits to try, separated by commas; empty for none.")
    ] = "24,16,12,8,6,4",
    only: Annotated[
        str,
        typer.Option(
            help="Settings to try in addition to the first, separated by commas.",
            show_default="all",
        ),
    ] = "",
    out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Ask a server one held-out question set under every setting.

    Exits with 1 if a setting other than an image token limit changed an answer, if a question got
    no answer, or if a setting meant to cause preemptions caused none.
    """
    from rich.console import Console

    from tests.bench.parts.accuracy.measure import offenders, undisturbed
    from tests.bench.parts.accuracy.variants import choose

    width = None if Console().is_terminal else PIPE_COLUMNS
    console = Console(width=width, highlight=False)
    for target in filter(None, (out, plot)):
        if not target.absolute().parent.is_dir():
            raise ConfigError(f"{target}: its folder is missing. Remedy: make it")
    variants = choose(_names(only), _tokens(budgets))
    examiner = _examiner(assignments or [])
    path = checkpoint or _trained(examiner)
    report = asyncio.run(
        _measure(examiner, path, variants, assignments or [], count, clients, console)
    )
    _show(report, console)
    if out is not None:
        write_json(out, report)
    if plot is not None:
        _plot(report, plot)
        console.print(f"Plot: {plot}")
    if offenders(report.outcomes) or undisturbed(report):
        raise typer.Exit(1)


def _names(only: str) -> list[str]:
    return [name.strip() for name in only.split(",") if name.strip()]


def _tokens(budgets: str) -> list[int]:
    """Return the image token limits.

    Raises:
        ConfigError: When one is not a number of tokens.
    """
    found = []
    for text in budgets.split(","):
        if not text.strip():
            continue
        if not text.strip().isdecimal() or int(text) < 1:
            raise ConfigError(f"--budgets: {text.strip()!r} is not a number of tokens, 1 or more")
        found.append(int(text))
    return found


def _examiner(assignments: list[str]) -> CheckpointTools:
    """Return the worker plug-in of the configuration.

    Raises:
        ConfigError: When it has no questions.
    """
    from vsched.checkpoint_tools import load_tools
    from vsched.config import load_config

    name = load_config(None, sets=assignments, environ={}).config.generate.plugin
    return load_tools(name, "exam_tasks", path="generate.plugin")


def _trained(examiner: CheckpointTools) -> str:
    path = examiner.trained_checkpoint()
    if not path:
        raise ConfigError(
            "CHECKPOINT is missing, and the trained one is not installed: wheels do not contain it. "
            "Remedy: give a folder, or run from a clone of the repository"
        )
    return path


async def _measure(
    examiner: CheckpointTools,
    path: str,
    variants: list[Variant],
    assignments: list[str],
    count: int,
    clients: int,
    console: Console,
) -> AccuracyReport:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from tests.bench.parts.accuracy.measure import Advance, measure_accuracy
    from tests.bench.parts.accuracy.questions import draw_questions

    with console.status("Drawing pictures …"):
        conversations = draw_questions(examiner, count)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        whole = progress.add_task("settings", total=len(variants))

        def started(variant: Variant, answers: int) -> Advance:
            for task in progress.task_ids:
                if task != whole:
                    progress.remove_task(task)
                    progress.advance(whole)
            task = progress.add_task(variant.name, total=answers)
            return lambda steps: progress.advance(task, steps)

        return await measure_accuracy(
            path,
            conversations=conversations,
            variants=variants,
            own=assignments,
            clients=clients,
            started=started,
        )


def _show(report: AccuracyReport, console: Console) -> None:
    from rich.table import Table

    first = report.outcomes[0]
    table = Table(
        title=f"{report.model}, {report.dtype}: right answers of {report.questions}, % "
        "(Wilson's 95 % interval)",
        title_justify="left",
    )
    table.add_column("setting", no_wrap=True)
    for task in first.tasks:
        table.add_column(f"{task.task}\n{task.total}", justify="right", no_wrap=True)
    for name in ("all", "changed", "failed", "cached", "encoded", "preempted", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in report.outcomes:
        table.add_row(*_cells(one))
    table.caption = (
        "changed: answers of all passes that differ from the first setting; "
        "cached: prompt tokens from the prefix cache; encoded: images encoded, of those asked about"
    )
    table.caption_justify = "left"
    console.print(table)
    for one in report.outcomes:
        _show_changes(one, console)
    for line in conclusions(report):
        console.print(line)


def _cells(one: VariantResult) -> list[str]:
    if one.impossible:
        return [one.name, "not possible"]
    return [
        one.name,
        *(
            f"{100 * task.right / task.total:.1f} ({100 * task.low:.0f}-{100 * task.high:.0f})"
            for task in one.tasks
        ),
        one.share.text(),
        str(len(one.changed)),
        str(one.failed),
        f"{100 * one.tokens_cached / max(one.prompt_tokens, 1):.0f} %",
        f"{one.images_encoded}/{one.images_asked}",
        str(one.preemptions),
        f"{one.seconds:.1f}",
    ]


def _show_changes(one: VariantResult, console: Console) -> None:
    if one.impossible:
        console.print(f"{one.name}: {one.impossible}", markup=False)
    for item in one.changed[:CHANGES_SHOWN]:
        where = f"{item.task} {item.conversation}, turn {item.turn + 1}"
        console.print(
            f"{one.name}: {where}: {_brief(item.reference)} became {_brief(item.answer)}; "
            f"right is {item.expected!r}",
            markup=False,
        )
    if len(one.changed) > CHANGES_SHOWN:
        console.print(f"{one.name}: and {len(one.changed) - CHANGES_SHOWN} more (--json has all)")


def _brief(answer: str) -> str:
    return repr(answer if len(answer) <= SHOWN_CHARACTERS else answer[:SHOWN_CHARACTERS] + "…")


def conclusions(report: AccuracyReport) -> list[str]:
    """Return the conclusions from the figures, and their limits."""
    from tests.bench.parts.accuracy.measure import undisturbed

    lines = [
        f"{one.name}: nothing was preempted, so this setting shows nothing; "
        "raise --clients or --count"
        for one in undisturbed(report)
    ]
    lines += [
        f"FAILED: {one.name}: {one.failed} questions got no answer"
        for one in report.outcomes
        if one.failed
    ]
    guilty = [one for one in report.outcomes if one.changed and not one.clamp]
    compared = sum(not one.clamp and not one.impossible for one in report.outcomes)
    if guilty:
        names = ", ".join(f"{one.name} ({len(one.changed)})" for one in guilty)
        lines.append(f"CHANGED without a clamp: {names}.")
    else:
        lines.append(f"No answer changed under {compared} settings without a clamp.")
    return lines


def _plot(report: AccuracyReport, path: Path) -> None:
    """Draw accuracy over the maximum tokens per image; without a limit, over those of the largest image."""
    first = report.outcomes[0]
    shown = [first, *(one for one in report.outcomes if one.clamp and not one.impossible)]
    shown.sort(key=_most_tokens)
    budgets = [_most_tokens(one) for one in shown]
    figure = new_figure(8, 4.5)
    axis = figure.subplots()
    for index, task in enumerate(first.tasks):
        tasks = [one.tasks[index] for one in shown]
        values = [100 * one.right / one.total for one in tasks]
        below = [value - 100 * one.low for value, one in zip(values, tasks, strict=True)]
        above = [100 * one.high - value for value, one in zip(values, tasks, strict=True)]
        # Shift the points, because overlapping intervals are unreadable.
        places = [budget * (1 + 0.012 * index) for budget in budgets]
        axis.errorbar(places, values, yerr=[below, above], marker="o", capsize=3, label=task.task)
    axis.set_xscale("log", base=2)
    labels = [
        f"{tokens}" if one.clamp else "none" for tokens, one in zip(budgets, shown, strict=True)
    ]
    axis.set_xticks(budgets, labels)
    axis.minorticks_off()
    axis.set_ylim(0, 102)
    axis.set_xlabel("clamp: maximum tokens of an image (encode.admission.max_tokens)")
    axis.set_ylabel("right answers, % (Wilson's 95 % interval)")
    axis.set_title(
        f"{report.model}: cost of an image token limit, {report.questions} questions a setting"
    )
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def _most_tokens(one: VariantResult) -> int:
    return one.clamp or one.image_tokens[1]
