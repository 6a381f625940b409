"""`vsched policies`: what is registered."""

from __future__ import annotations

import sys

from vsched.cli import app
from vsched.plugins import PolicyField, RegisteredPolicy, list_policies

PIPE_COLUMNS = 160
"""Width of the table where there is no terminal to ask."""


@app.command()
def policies() -> None:
    """List the registered policies with their fields and defaults."""
    from rich.console import Console
    from rich.table import Table

    table = Table("kind", "name", "fields and defaults", "what it does")
    kind = ""
    for policy in list_policies():
        if kind and policy.kind != kind:
            table.add_section()
        shown_kind = policy.kind if policy.kind != kind else ""
        kind = policy.kind
        table.add_row(shown_kind, policy.name, _fields(policy), policy.error or policy.summary)
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, markup=False).print(table)


def _fields(policy: RegisteredPolicy) -> str:
    return "\n".join(f"{field.name} = {_default(field)}" for field in policy.fields)


def _default(field: PolicyField) -> str:
    if field.required:
        return f"({field.type}, required)"
    if field.default is None:
        return f"({field.type}, not set)"
    return repr(field.default)
