"""The configuration as text: effective values as TOML, and a table for the documentation."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
from functools import cache

import msgspec

from vsched.config import sections
from vsched.config.loading import LoadedConfig
from vsched.config.policies import policy_table
from vsched.config.sections import Config, config_keys
from vsched.plugins import type_text
from vsched.policy import DECISIONS, SEVERAL, TABLES


def to_toml(loaded: LoadedConfig, *, origin: bool = False) -> str:
    """Format the effective configuration as TOML that loads to the same configuration.

    With `origin`, a comment after each key names the source of its value.
    """
    built = loaded.policies.by_table
    lines: list[str] = []
    section = ""
    for key, source in loaded.origins.items():
        table, _, name = key.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
            section = table
        policy = built.get(table)
        if table == SEVERAL:
            value = loaded.config.policy[name]
        elif policy is not None and name == "use":
            value = policy_table(loaded.config, table)["use"]
        else:
            value = policy if policy is not None else loaded.config
            for part in [name] if policy is not None else key.split("."):
                value = getattr(value, part)
        text = f"{name} = {toml_value(value)}" if value is not None else f"# {name} is not set"
        lines.append(f"{text}  # {source}" if origin else text)
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """Format a value as TOML on one line."""
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        fields = ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in plain.items())
        return f"{{{fields}}}"
    if isinstance(plain, list | tuple):
        return f"[{', '.join(map(toml_value, plain))}]"
    # JSON's strings, numbers and booleans are valid TOML, with one exception.
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def keys_table() -> str:
    """Every key as Markdown: a heading and a table per section, top-level keys first."""
    sections: dict[str, list[str]] = {"": []}
    descriptions = key_descriptions()
    for path, field in config_keys().items():
        default = field.default
        if default is msgspec.NODEFAULT:
            default = policy_table(Config(), path)
        shown = f"`{toml_value(default)}`" if default is not None else "not set"
        kind = "policy" if path in TABLES else type_text(field.type).replace("'", "`")
        row = f"| `{path}` | {kind} | {shown} | {descriptions[path]} |"
        sections.setdefault(path.rpartition(".")[0], []).append(row)
    head = ["", "| key | type | default | |", "|---|---|---|---|"]
    parts = [
        "\n".join([f"### {f'`{name}`' if name else 'Top level'}", *head, *rows])
        for name, rows in sections.items()
    ]
    return "\n\n".join(parts) + "\n"


@cache
def key_descriptions() -> dict[str, str]:
    """Return the description of each key: that of the decision for a policy table, otherwise the text after the key."""
    texts: dict[tuple[str, str], str] = {}
    for cls in ast.parse(inspect.getsource(sections)).body:
        for field, after in itertools.pairwise(cls.body if isinstance(cls, ast.ClassDef) else ()):
            match cls, field, after:
                case (
                    ast.ClassDef(name=owner),
                    ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[owner, name] = " ".join(text.split())
    tables = {one.path: one.description for each in DECISIONS.values() for one in each.selected_by}
    found = {}
    for path in config_keys():
        section, _, name = path.rpartition(".")
        bases = type(getattr(Config(), section)).__mro__ if section else (Config,)
        own = [texts[base.__name__, name] for base in bases if (base.__name__, name) in texts]
        found[path] = tables[path] if path in tables else own[0]
    return found
