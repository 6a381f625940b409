"""`vsched policies`: list registered policies, describe one, try one, and draw the figures of the gallery."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from vsched.cli import app
from vsched.errors import ConfigError
from vsched.plugins import (
    PolicyField,
    RegisteredPolicy,
    describe_policy,
    did_you_mean,
    list_policies,
    load_policy_class,
)
from vsched.policy import DECISIONS, POLICY_TABLES, SEVERAL, decisions_of
from vsched.terminal.options import check_writable, table_console

policies_app = typer.Typer(help="List the registered policies, describe one, or try one.")
app.add_typer(policies_app, name="policies")


@policies_app.callback(invoke_without_command=True)
def policies(context: typer.Context) -> None:
    """List the registered policies with their fields and defaults, or describe one."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("kind", "name", "fields and defaults", "what it does")
    kind = ""
    for policy in list_policies():
        if kind and policy.kind != kind:
            table.add_section()
        shown_kind = policy.kind if policy.kind != kind else ""
        kind = policy.kind
        texts = (shown_kind, policy.name, _fields(policy), policy.error or policy.summary)
        table.add_row(*map(Text, texts))
    table_console().print(table)


@policies_app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(help="Name of a policy, as `vsched policies` lists it, or module:Class."),
    ],
) -> None:
    """Describe a policy and its fields.

    A class that is not registered, named as module:Class, is described with all its decisions.
    """
    for policy in [describe_policy(name)] if ":" in name else _registered(name):
        typer.echo("\n".join(_about(policy)))


@policies_app.command("try")
def try_(
    name: Annotated[str, typer.Argument(help="module:Class, or the name of a built-in policy.")],
    *,
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Set one of its fields."),
    ] = None,
    seats: Annotated[
        list[str] | None,
        typer.Option(
            "--seat",
            metavar="TABLE",
            help="A table that it decides for, such as encode.admission; by default all that it has methods for, of "
            "two stages the generate stage.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run fewer checks and cases.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write the report as one HTML file."),
    ] = None,
) -> None:
    """Check a policy, run it with random faults, and compare it with the built-ins on the gallery's workloads.

    The exit status is 1 if a check failed.
    """
    from vsched.cli.policy_trial import report, write_html
    from vsched.config.loading import parse_value
    from vsched.sim.report.rendering import load_jinja
    from vsched.terminal.progress import counting_progress
    from vsched.testing import policy_trial

    check_writable({"--html": html})
    if html is not None:
        load_jinja()
    targets = [name] if ":" in name else sorted({one.target for one in _registered(name)})
    if len(targets) > 1:
        raise ConfigError(f"{name}: several policies. Remedy: name one of {', '.join(targets)}")
    (target,) = targets
    table: dict[str, Any] = {"use": target}
    for assignment in fields or ():
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: not an assignment. Remedy: write FIELD=VALUE")
        table[key.strip()] = parse_value(text.strip())
    with counting_progress() as on_progress:
        trial = policy_trial.try_policy(
            table,
            tables=seats or (),
            effort=policy_trial.QUICK if quick else policy_trial.THOROUGH,
            on_progress=on_progress,
        )
    table_console().print(report(trial, target))
    if html is not None:
        write_html(trial, target, html)
        typer.echo(f"wrote {html}")
    if not trial.passed:
        raise typer.Exit(1)


def _registered(name: str) -> list[RegisteredPolicy]:
    """Return the registered policies of this name."""
    every = list_policies()
    if found := [policy for policy in every if policy.name == name]:
        return found
    idea = did_you_mean(name, {policy.name for policy in every})
    raise ConfigError(
        f"{name}: no such policy; `vsched policies` lists them. Remedy: name it as module:Class.{idea}"
    )


@policies_app.command()
def gallery(
    folder: Annotated[Path, typer.Argument(help="Folder for the figures, created if missing.")],
    *,
    traces: Annotated[
        bool, typer.Option("--traces", help="Also write the requests of each case as a trace.")
    ] = False,
) -> None:
    """Draw the figures of docs/policies.md: every gallery case, in the simulator."""
    from vsched.sim.gallery import CASES, draw_case, run_choice
    from vsched.sim.workload.traces import save_trace

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be created: {error.strerror}. Remedy: name another folder"
        ) from error
    for case in CASES.values():
        path = folder / f"policies-{case.name}.png"
        try:
            draw_case(case, [run_choice(case, label) for label in case.choices], path)
        except ImportError as error:
            raise ConfigError(
                f"{path}: {error.name} is not installed. Remedy: pip install 'vsched[report]'"
            ) from error
        typer.echo(f"wrote {path}")
        if traces:
            path = path.with_suffix(".jsonl")
            save_trace(case.workload(), path)
            typer.echo(f"wrote {path}")


def _about(policy: RegisteredPolicy) -> list[str]:
    """Return the description of a policy as lines."""
    if policy.error:
        return [f"{policy.kind}: {policy.name} cannot be used: {policy.error}"]
    cls = load_policy_class(policy.kind, policy.target)
    made = decisions_of(cls) if policy.kind == SEVERAL else [policy.kind]
    registered = f"{policy.kind}: {policy.name} ({policy.target})"
    heading = registered if policy.name != policy.target else policy.target
    lines = [heading, "", inspect.getdoc(cls) or "(no docstring)", "", "Decisions:"]
    for kind in made:
        tables = [table for table, decision in POLICY_TABLES.items() if decision == kind]
        lines.append(f"  {kind}: {DECISIONS[kind].method}(), configured in {' or '.join(tables)}")
    if len(made) > 1:
        lines.append(f"  all with one state: configured in the table {SEVERAL}")
    if cls.state_type is not None:
        lines.append(f"State: {cls.state_type.__qualname__}")
    lines.append("Fields:" if policy.fields else "Fields: none")
    lines += [f"  {field.name} = {_default(field)}  ({field.type})" for field in policy.fields]
    return [*lines, "", f"Its effect: vsched policies try {policy.name}"]


def _fields(policy: RegisteredPolicy) -> str:
    return "\n".join(f"{field.name} = {_default(field)}" for field in policy.fields)


def _default(field: PolicyField) -> str:
    if field.required:
        return f"({field.type}, required)"
    if field.default is None:
        return f"({field.type}, not set)"
    return repr(field.default)
