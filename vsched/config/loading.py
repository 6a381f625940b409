"""Load a configuration: defaults, then the file, then the environment, then the command line.

Each layer is a tree of values. Layers are merged key by key, and the origin of each value is kept. Policy tables are an
exception: their fields belong to the policy that they name, so a layer that names a policy (`use`) replaces the whole
table of the lower layers.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vsched.config.checks import check_combinations, check_texts
from vsched.config.devices import DeviceChoice, assumed, settle
from vsched.config.policies import (
    ConfiguredPolicies,
    check_needs,
    policy_table,
    resolve_policies,
)
from vsched.config.sections import Config, config_keys
from vsched.errors import ConfigError, ConfigProblems
from vsched.plain_values import InvalidValue, plain_struct
from vsched.plugins import convert_value, did_you_mean
from vsched.policy import POLICY_TABLES, SEVERAL, TABLES

ENVIRONMENT_PREFIX = "VSCHED__"
COMMAND_LINE = "command line"
DEFAULT = "default"
RECORDED = "record"
ALTERNATIVES = {"generate.memory": ("tokens", "bytes")}
"""Mutually exclusive fields of policy tables: setting one removes the others."""

Tree = dict[str, Any]
Origin = Callable[[str], str]
"""Returns the origin of a layer's value for a key."""


class LoadedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A validated configuration.

    A stage may still have the device `auto` on a host with a GPU; `vsched.devices.resolve_loaded` chooses one.

    Attributes:
        origins: Source of each key's value: `default`, `file PATH`, `environment NAME`, `command line`, `record`.
            Policy fields are keys too, such as `encode.admission.max_tokens`.
        policies: The configured policies.
        devices: The devices of the stages, and the reason, once they are chosen.
    """

    config: Config
    origins: dict[str, str]
    policies: ConfiguredPolicies
    devices: DeviceChoice | None = None


def load_config(
    path: str | os.PathLike[str] | None,
    *,
    sets: Sequence[str] = (),
    environ: Mapping[str, str],
    base: Tree | None = None,
) -> LoadedConfig:
    """Load and check a configuration.

    Args:
        path: A TOML file, or None for no file.
        sets: Assignments `a.b=c` from the command line; later ones take precedence.
        environ: The environment; only variables `VSCHED__A__B` are used.
        base: Values below all of these, such as the configuration in a record.

    Raises:
        ConfigError: With all errors, one per line, each starting with the path of a key or file. Invalid combinations
            are reported once every single value is valid.
        PolicyError: If a policy class does not meet its contract.
    """
    problems = ConfigProblems()
    merged: dict[str, tuple[Any, str]] = {}
    for table in POLICY_TABLES:
        for field, value in policy_table(Config(), table).items():
            merged[f"{table}.{field}"] = (value, DEFAULT)
    file = None if path is None else Path(path)
    for origin, tree in _layers(base, file, sets, environ, problems):
        _lay_over(merged, tree, origin, problems)
    config = _convert(merged, problems)
    with problems.collected():
        policies = resolve_policies(config)
        check_needs(config, policies.by_table)
    if problems:
        with problems.collected():
            check_texts(config)
        problems.raise_all()
    config, devices = settle(config, environ)
    # Limits are wider with CUDA; `vsched.devices` checks again.
    check_combinations(assumed(config, "cuda") if devices is None else config)
    return LoadedConfig(
        config=config,
        origins=_origins(config, merged, policies),
        policies=policies,
        devices=devices,
    )


def plain_config(config: Config) -> Config:
    """Convert the values of a configuration built in Python to their declared types; see `plain_value`.

    Bounds are not checked: simulations use smaller engines than a file may configure.

    Raises:
        ConfigError: If it is not a `Config`, or a value has the wrong type.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            InvalidValue("config", config, "`Config`").message("pass `load_config(...).config`")
        )
    try:
        return plain_struct(config, Config, bounds=False)
    except InvalidValue as error:
        raise ConfigError(
            error.message("set a value of this type, or leave it out for the default")
        ) from None


def _layers(
    base: Tree | None,
    path: Path | None,
    sets: Sequence[str],
    environ: Mapping[str, str],
    problems: ConfigProblems,
) -> Iterator[tuple[Origin, Tree]]:
    """Yield the layers, lowest first.

    The whole environment is one layer, and so is the whole command line: within a layer, the order of a policy's name
    and its fields must not matter.
    """
    if base is not None:
        yield lambda _: RECORDED, base
    if path is not None:
        tree: Tree = {}
        with problems.collected():
            tree = _read(path)
        yield lambda _: f"file {path}", tree
    environment: Tree = {}
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _merge(environment, _assignment(key, environ[name]))
    yield lambda path: f"environment {_environment_variable(path)}", environment
    command_line: Tree = {}
    for assignment in sets:
        key, equals, text = assignment.partition("=")
        if not equals:
            problems.add(f"{assignment}: not an assignment; write --set section.key=value")
            continue
        _merge(command_line, _assignment(key.strip(), text.strip()))
    yield lambda _: COMMAND_LINE, command_line


def _environment_variable(path: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{path.upper().replace('.', '__')}"


def _read(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Remedy: check the path of --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not valid TOML: {error}. Remedy: correct that line; a configuration in YAML or JSON has to be "
            "written in TOML, as [generate] and slots = 8"
        ) from error


def _assignment(key: str, text: str) -> Tree:
    """Convert one `a.b=c` to a tree."""
    field = config_keys().get(key)
    value: Any = parse_value(text) if field is None else _parse_as(text, field.type)
    tree: Tree = {}
    for part in reversed(key.split(".")):
        tree = {part: value}
        value = tree
    return tree


def _parse_as(text: str, wanted: Any) -> Any:
    """Use the text unchanged if a string is wanted: `model.name=7` is the name "7"."""
    if text[:1] not in ('"', "'"):
        try:
            return msgspec.convert(text, wanted)
        except msgspec.ValidationError:
            pass
    return parse_value(text)


def parse_value(text: str) -> Any:
    """Parse a TOML value; other text is taken literally, so that shells need no second pair of quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _merge(into: Tree, tree: Tree) -> None:
    """Add a tree; a value in place of a table stays, so that it is reported."""
    for key, value in tree.items():
        if not isinstance(value, dict) or key not in into:
            into[key] = value
        elif isinstance(into[key], dict):
            _merge(into[key], value)


def _lay_over(
    merged: dict[str, tuple[Any, str]], tree: Tree, origin: Origin, problems: ConfigProblems
) -> None:
    """Merge a layer over the lower ones; keys of `merged` are paths, including those of policy fields."""
    for path, value in _flatten(tree, "", origin, problems):
        if path not in TABLES:
            merged[path] = (value, origin(path))
            continue
        ways = ALTERNATIVES.get(path, ())
        for key in [key for key in merged if key.startswith(f"{path}.")]:
            other_way = key.rpartition(".")[2] in ways and any(way in value for way in ways)
            if "use" in value or other_way:
                del merged[key]
        for field, field_value in value.items():
            merged[f"{path}.{field}"] = (field_value, origin(f"{path}.{field}"))


def _flatten(
    tree: Tree, prefix: str, origin: Origin, problems: ConfigProblems
) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a layer by path; a policy table is one key."""
    known = config_keys()
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in TABLES:
            if isinstance(value, dict):
                yield path, value
            else:
                problems.add(
                    f'{path} (from {origin(path)}): not a table; write {path} = {{use = "..."}}'
                )
        elif path in known:
            yield path, value
        elif not any(name.startswith(f"{path}.") for name in known):
            problems.add(f"{path} (from {origin(path)}): unknown key.{_suggestion(path)}")
        elif isinstance(value, dict):
            yield from _flatten(value, f"{path}.", origin, problems)
        else:
            problems.add(f"{path} (from {origin(path)}): a table of keys, not a value")


def _suggestion(path: str) -> str:
    """Suggestion for an unknown key: the same name elsewhere, a similar key, or the keys of its section."""
    known = list(config_keys())
    sections = list(dict.fromkeys(name.partition(".")[0] for name in known))
    section, _, name = path.rpartition(".")
    elsewhere = [one for one in known if one.rpartition(".")[2] == name]
    if elsewhere:
        return f" Did you mean {' or '.join(elsewhere)}?"
    siblings = [one for one in known if section and one.rpartition(".")[0] == section]
    return (
        did_you_mean(path, {*known, *sections}) or f" Keys here: {', '.join(siblings or sections)}."
    )


def _convert(merged: dict[str, tuple[Any, str]], problems: ConfigProblems) -> Config:
    """Convert all valid values; invalid ones keep their defaults."""
    tree: Tree = {}
    for path, field in config_keys().items():
        *sections, name = path.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        if path in TABLES:
            table[name] = {
                key.removeprefix(f"{path}."): value
                for key, (value, _) in merged.items()
                if key.startswith(f"{path}.")
            }
        elif path in merged:
            value, origin = merged[path]
            with problems.collected():
                table[name] = convert_value(value, field.type, path=path, origin=origin)
    return msgspec.convert(tree, Config)


def _origins(
    config: Config, merged: dict[str, tuple[Any, str]], policies: ConfiguredPolicies
) -> dict[str, str]:
    origins: dict[str, str] = {}
    for path in config_keys():
        keys = [path]
        if path == SEVERAL:
            keys = [f"{path}.{name}" for name in config.policy]
        elif path in policies.several:
            continue
        elif path in POLICY_TABLES:
            fields = msgspec.structs.fields(policies.by_table[path])
            keys = [f"{path}.{name}" for name in ("use", *(one.encode_name for one in fields))]
        for key in keys:
            origins[key] = merged[key][1] if key in merged else DEFAULT
    return origins
