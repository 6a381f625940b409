"""The configuration as text: effective values as TOML, a JSON Schema for editors, a table for the documentation."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from functools import cache
from typing import Any

import msgspec

from vsched.config import sections
from vsched.config.loading import LoadedConfig
from vsched.config.policies import policy_table
from vsched.config.sections import Config, config_keys
from vsched.plugins import list_policies, load_policy_class, type_text
from vsched.policy import DECISIONS, POLICY_TABLES, SEVERAL, TABLES


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
        fields = ", ".join(f"{key} = {toml_value(item)}" for key, item in plain.items())
        return f"{{{fields}}}"
    if isinstance(plain, list | tuple):
        return f"[{', '.join(map(toml_value, plain))}]"
    # JSON's strings, numbers and booleans are valid TOML, with one exception.
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


def config_schema() -> dict[str, Any]:
    """JSON Schema of the whole file, including the fields of registered policies."""
    schema = msgspec.json.schema(Config)
    definitions = schema["$defs"]
    for path, text in key_descriptions().items():
        section, _, name = path.rpartition(".")
        definitions[_owner(section)]["properties"][name]["description"] = text
    for path, kind in POLICY_TABLES.items():
        section, _, name = path.rpartition(".")
        key = definitions[_owner(section)]["properties"][name]
        default = policy_table(Config(), path)
        key["default"] = default
        key["anyOf"] = [
            *_policy_schemas(kind, default["use"], definitions),
            {
                "properties": {"use": {"type": "string", "pattern": "^[^:]+:[^:]+$"}},
                "required": ["use"],
            },
        ]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "vsched"
    return schema


def _policy_schemas(
    kind: str, default_name: str, definitions: dict[str, Any]
) -> list[dict[str, Any]]:
    schemas = []
    for found in list_policies():
        if found.kind != kind or found.error is not None:
            continue
        cls = load_policy_class(kind, found.name)
        (_, components) = msgspec.json.schema_components([cls], ref_template="#/$defs/{name}")
        own = components.pop(cls.__name__)
        definitions.update(components)
        properties = {"use": {"const": found.name}, **own["properties"]}
        required = own.get("required", [])
        schemas.append(
            {
                "description": found.summary,
                "properties": properties,
                "additionalProperties": False,
                "required": required if found.name == default_name else ["use", *required],
            }
        )
    return schemas


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


def _owner(section: str) -> str:
    """Name of the class of a section; empty for the top level."""
    return f"{section.capitalize()}Config"


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
