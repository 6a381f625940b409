"""Load a configuration: defaults, then the file, then the environment, then the command line.

Each layer is a tree of values. Layers are laid over each other key by key, and every key remembers where its value came
from. Policy tables are the exception: their fields belong to the policy that they name, so a layer that names one
(`use`) replaces the whole table of the layers below.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vsched.config.policies import (
    ConfiguredPolicies,
    check_combinations,
    policy_table,
    resolve_policies,
)
from vsched.config.sections import POLICY_TABLES, Config, config_keys
from vsched.errors import ConfigError
from vsched.plugins import convert_value

ENVIRONMENT_PREFIX = "VSCHED__"
COMMAND_LINE = "command line"
DEFAULT = "default"
ALTERNATIVES = {"generate.memory": ("tokens", "bytes")}
"""Fields of a policy table of which one replaces the other."""

Tree = dict[str, Any]
Origin = Callable[[str], str]
"""Says where a layer's value of a key came from."""


class LoadedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that has been checked.

    Attributes:
        origins: Where the value of each key came from: `default`, `file PATH`, `environment NAME`, `command line`. The
            fields of a policy are keys too, such as `encode.admission.max_tokens`.
        policies: The policies that it names, built.
    """

    config: Config
    origins: dict[str, str]
    policies: ConfiguredPolicies


def load_config(
    path: Path | None, *, sets: Sequence[str] = (), environ: Mapping[str, str]
) -> LoadedConfig:
    """Load and check a configuration.

    Args:
        path: A TOML file, or None for no file.
        sets: Assignments `a.b=c` of the command line; a later one wins.
        environ: The environment, of which variables `VSCHED__A__B` count.

    Raises:
        ConfigError: When anything is wrong; the message starts with the key's path or the file's.
        PolicyError: When a policy's class does not meet its contract.
    """
    merged: dict[str, tuple[Any, str]] = {}
    for table in POLICY_TABLES:
        for field, value in policy_table(Config(), table).items():
            merged[f"{table}.{field}"] = (value, DEFAULT)
    for origin, tree in _layers(path, sets, environ):
        _lay_over(merged, tree, origin)
    config = _convert(merged)
    check_combinations(config)
    policies = resolve_policies(config)
    return LoadedConfig(
        config=config, origins=_origins(config, merged, policies), policies=policies
    )


def _layers(
    path: Path | None, sets: Sequence[str], environ: Mapping[str, str]
) -> Iterator[tuple[Origin, Tree]]:
    """Yield the layers, lowest first.

    All of the environment is one layer, and so is all of the command line: within a layer it must not matter whether
    a policy is named before or after its fields.
    """
    if path is not None:
        yield lambda _: f"file {path}", _read(path)
    environment: Tree = {}
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _merge(environment, _assignment(key, environ[name]))
    yield _environment_name, environment
    command_line: Tree = {}
    for assignment in sets:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"{assignment}: not an assignment; write --set section.key=value")
        _merge(command_line, _assignment(key.strip(), text.strip()))
    yield lambda _: COMMAND_LINE, command_line


def _environment_name(path: str) -> str:
    return f"environment {ENVIRONMENT_PREFIX}{path.upper().replace('.', '__')}"


def _read(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Remedy: check the path of --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}. Remedy: mend that line") from error


def _assignment(key: str, text: str) -> Tree:
    """Return the tree of one `a.b=c`."""
    field = config_keys().get(key)
    value: Any = _parse(text) if field is None else _parse_as(text, field.type)
    tree: Tree = {}
    for part in reversed(key.split(".")):
        tree = {part: value}
        value = tree
    return tree


def _parse_as(text: str, wanted: Any) -> Any:
    """Take the text as it is where a text is wanted: `model.name=7` is the name "7"."""
    if text[:1] not in ('"', "'"):
        try:
            return msgspec.convert(text, wanted)
        except msgspec.ValidationError:
            pass
    return _parse(text)


def _parse(text: str) -> Any:
    """Parse a TOML value; what is none stands for itself, so that shells need no second pair of quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _merge(into: Tree, tree: Tree) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _lay_over(merged: dict[str, tuple[Any, str]], tree: Tree, origin: Origin) -> None:
    """Lay a layer over those below; keys of `merged` are paths, fields of policies included."""
    for path, value in _flatten(tree, "", origin):
        if path not in POLICY_TABLES:
            merged[path] = (value, origin(path))
            continue
        ways = ALTERNATIVES.get(path, ())
        for key in [key for key in merged if key.startswith(f"{path}.")]:
            other_way = key.rpartition(".")[2] in ways and any(way in value for way in ways)
            if "use" in value or other_way:
                del merged[key]
        for field, field_value in value.items():
            merged[f"{path}.{field}"] = (field_value, origin(f"{path}.{field}"))


def _flatten(tree: Tree, prefix: str, origin: Origin) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a layer by path; a policy table is one key."""
    known = config_keys()
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in POLICY_TABLES:
            if not isinstance(value, dict):
                raise ConfigError(
                    f'{path} (from {origin(path)}): not a table; write {path} = {{use = "..."}}'
                )
            yield path, value
        elif path in known:
            yield path, value
        elif not any(name.startswith(f"{path}.") for name in known):
            raise ConfigError(
                f"{path} (from {origin(path)}): unknown key. {_suggestion(path, list(known))}"
            )
        elif isinstance(value, dict):
            yield from _flatten(value, f"{path}.", origin)
        else:
            raise ConfigError(f"{path} (from {origin(path)}): a table of keys, not a value")


def _suggestion(path: str, known: list[str]) -> str:
    sections = list(dict.fromkeys(name.partition(".")[0] for name in known))
    close = difflib.get_close_matches(path, [*known, *sections], n=3)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    section = path.rpartition(".")[0]
    beside = [name for name in known if section and name.rpartition(".")[0] == section]
    return f"Keys here: {', '.join(beside or sections)}."


def _convert(merged: dict[str, tuple[Any, str]]) -> Config:
    tree: Tree = {}
    for path, field in config_keys().items():
        *sections, name = path.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        if path in POLICY_TABLES:
            table[name] = {
                key.removeprefix(f"{path}."): value
                for key, (value, _) in merged.items()
                if key.startswith(f"{path}.")
            }
        elif path in merged:
            value, origin = merged[path]
            table[name] = convert_value(value, field.type, path=path, origin=origin)
    return msgspec.convert(tree, Config)


def _origins(
    config: Config, merged: dict[str, tuple[Any, str]], policies: ConfiguredPolicies
) -> dict[str, str]:
    built = policies.by_table()
    origins: dict[str, str] = {}
    for path in config_keys():
        keys = [path]
        if path in POLICY_TABLES:
            fields = [field.encode_name for field in msgspec.structs.fields(built[path])]
            keys = [f"{path}.{name}" for name in ("use", *fields)]
        for key in keys:
            origins[key] = merged[key][1] if key in merged else DEFAULT
    return origins
