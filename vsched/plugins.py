"""Find policies by name, check them against their contracts, and build them from configuration tables.

A name is an entry point, or `my_pkg.module:Class` for an unregistered class. Only named classes are imported. Contract
violations are detected at registration and not while requests are served.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import msgspec

from vsched.errors import (
    ConfigError,
    ConfigProblems,
    PolicyError,
    described,
    limit_message,
    reraise_interrupt,
)
from vsched.policy import (
    DECISIONS,
    POLICY_TABLES,
    SEVERAL,
    Policy,
    decisions_of,
    join_seats,
    tables_of,
    without_seats,
)
from vsched.policy_host.seats import check_state_type

INT64_END = 2**63
"""Numbers of a configuration are below it: records and messages have integers of 64 bits."""
ABOUT = 0.05
"""Suggestions may be less similar than the best match by at most this much, on a scale of 0 to 1."""


class PolicyField(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration field of a policy; `default` is None for a required field too."""

    name: str
    type: str
    required: bool
    default: Any = None


class RegisteredPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a registered policy; `error` is the reason that it cannot be used, or None."""

    kind: str
    name: str
    target: str
    fields: tuple[PolicyField, ...] = ()
    summary: str = ""
    error: str | None = None


def resolve_policy(kind: str, table: Mapping[str, Any], *, path: str = "") -> Policy:
    """Build a policy from a configuration table `{use = "...", **fields}`.

    Raises:
        ConfigError: If the name or a field is unknown, or a value has the wrong type; each line of the message starts
            with the path of a key, and `path` is the path of the table.
        PolicyError: If the class does not meet its contract.
    """
    path = path or kind
    name = table.get("use")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}.use: no policy is named. {_known(_group(kind))}")
    cls = load_policy_class(kind, name, path=f"{path}.use")
    fields = {key: value for key, value in table.items() if key != "use"}
    known = {field.encode_name: field for field in msgspec.structs.fields(cls)}
    problems = ConfigProblems()
    for key, value in fields.items():
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            problems.add(
                f"{path}.{key}: unknown field of {name!r}. Its fields: {listed}.{did_you_mean(key, known)}"
            )
            continue
        with problems.collected():
            convert_value(value, known[key].type, path=f"{path}.{key}")
    for key in [key for key, field in known.items() if field.required and key not in fields]:
        problems.add(
            f"{path}.{key}: a field of {name!r} without a default. Remedy: set it; in `vsched policies try`, with "
            f"--set {key}=VALUE"
        )
    problems.raise_all()
    try:
        return msgspec.convert(fields, cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    except BaseException as error:  # __post_init__ may raise anything
        reraise_interrupt(error)
        raise ConfigError(
            f"{path}: {name!r} cannot be built: {described(error)}. Remedy: correct the class"
        ) from error


def resolve_several(table: Mapping[str, Any]) -> tuple[Policy, list[str]]:
    """Build the policy of the table `policy`; return it with the tables that it stands for.

    Raises:
        ConfigError, PolicyError: As from `resolve_policy`.
    """
    policy = resolve_policy(SEVERAL, without_seats(table))
    return policy, seats_of(policy, table)


def seats_of(policy: Policy, table: Mapping[str, Any], *, without: Sequence[str] = ()) -> list[str]:
    """Return the tables that the table `policy` stands for: those in `seats`, or all for which it has a method."""
    able = sorted({*tables_of(type(policy))}.difference(without))
    named = table.get("seats", able)
    if not isinstance(named, list) or not named or not {*able}.issuperset(named):
        raise ConfigError.of_limit(
            f"policy.seats: not tables for which {type(policy).__name__} has a method",
            value=repr(named),
            limit=f"a list of {', '.join(able)}",
            remedy="leave it out for all of them",
        )
    return named


def load_policy_class(kind: str, name: str, *, path: str = "use") -> type[Policy]:
    """Import the class of this name and check it against its contract.

    Raises:
        ConfigError: If the name is unknown or its module cannot be imported.
        PolicyError: If the class does not meet the contract.
    """
    target = load_registered(_group(kind), name, path=path)
    try:
        return check_contract(target, kind)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from None


def import_policies(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Import the modules of policy tables, by path; other errors are left to `resolve_policy`.

    Raises:
        ConfigError: If a name is unknown or its module cannot be imported.
    """
    for path, table in join_seats(tables).items():
        kind = SEVERAL if path == SEVERAL else POLICY_TABLES.get(path)
        name = table.get("use")
        if kind is not None and isinstance(name, str) and name:
            load_registered(_group(kind), name, path=f"{path}.use")


def convert_value(value: object, wanted: Any, *, path: str, origin: str = "") -> Any:
    """Convert one configuration value strictly.

    Raises:
        ConfigError: If the value is not valid; the message gives the key's path, value, limit and remedy.
    """
    problem = bound = ""
    try:
        converted = msgspec.convert(value, wanted)
        bound = _general_bound(converted)
        if not bound:
            return converted
    except msgspec.ValidationError as error:
        problem = str(error)
    limit = type_text(wanted)
    if problem and limit in ("array", "object"):  # this says nothing about the values inside
        limit += f" ({problem})"
    elif bound:
        limit += f", {bound}"
    message = limit_message(
        f"{path}{f' (from {origin})' if origin else ''} is not valid",
        value=repr(value),
        limit=limit,
        remedy=f"set {path} within the limit, or leave it out for the default",
    )
    raise ConfigError(message)


def _general_bound(value: object) -> str:
    """Bound for values of all keys, if this value violates one; otherwise an empty text."""
    if isinstance(value, int | float) and not abs(value) < INT64_END:  # NaN is not below it
        return "below 2**63"
    return "without NUL characters" if isinstance(value, str) and "\0" in value else ""


def check_contract(cls: object, kind: str) -> type[Policy]:
    """Return the class if it can make the decision of this name; `policy` stands for all that it has methods for.

    Raises:
        PolicyError: With the class, the method and the difference in its message.
    """
    if kind == SEVERAL and isinstance(cls, type) and issubclass(cls, Policy):
        made = decisions_of(cls)
        if not made:
            raise PolicyError(
                f"{cls.__module__}.{cls.__qualname__}: overrides no method of a policy class"
            )
        for one in made:
            check_contract(cls, one)
        return cls
    base = DECISIONS[kind].base if kind in DECISIONS else Policy
    wanted = f"vsched.policy.{base.__qualname__}"
    if not isinstance(cls, type):
        raise PolicyError(f"{cls!r}: not a class; {kind} policies subclass {wanted}")
    name = f"{cls.__module__}.{cls.__qualname__}"
    if not issubclass(cls, base):
        parents = ", ".join(parent.__qualname__ for parent in cls.__bases__)
        raise PolicyError(f"{name}: not a subclass of {wanted} (its bases: {parents})")
    if not cls.__struct_config__.frozen:
        raise PolicyError(
            f"{name}: not frozen; declare it `class {cls.__name__}(..., frozen=True)`"
        )
    if cls.api_version != base.api_version:
        raise PolicyError(
            f"{name}: made for version {cls.api_version} of {base.__qualname__}, "
            f"this is version {base.api_version}"
        )
    hidden = sorted(
        {one.method for one in DECISIONS.values() if issubclass(cls, one.base)}
        & {*cls.__struct_fields__}
    )
    if hidden:
        raise PolicyError(f"{name}: the field `{hidden[0]}` hides a method; give it another name")
    if "use" in {field.encode_name for field in msgspec.structs.fields(cls)}:
        raise PolicyError(
            f"{name}: the field `use` cannot be set, since it names the class in a table; give it another name"
        )
    _check_method(cls, kind, name)
    try:
        check_state_type(cls, kind)
    except PolicyError as error:
        raise PolicyError(f"{name}: {error}") from error
    return cls


def list_policies() -> list[RegisteredPolicy]:
    """Return all registered policies, in the order of the contracts and then by name."""
    listed = []
    for kind in (*DECISIONS, SEVERAL):
        for point in _registered(_group(kind)):
            try:
                cls = check_contract(_import(point.value), kind)
            except Exception as error:  # noqa: BLE001 - a broken package must not hide the others
                reason = f"{type(error).__name__}: {error}"
                found = RegisteredPolicy(
                    kind=kind, name=point.name, target=point.value, error=reason
                )
            else:
                found = _described(cls, kind, point.name, point.value)
            listed.append(found)
    return listed


def registered_policies(kind: str) -> list[str]:
    """Return the names of the registered policies of a kind, without loading them."""
    return [point.name for point in _registered(_group(kind))]


def describe_policy(target: str) -> RegisteredPolicy:
    """Return the facts about a class named as `package.module:Class`, which may make several decisions.

    Raises:
        ConfigError: If it cannot be imported.
        PolicyError: If the class does not meet its contract.
    """
    cls = load_policy_class(SEVERAL, target, path=target)
    return _described(cls, SEVERAL, target, target)


def _described(cls: type[Policy], kind: str, name: str, target: str) -> RegisteredPolicy:
    fields = []
    for field in msgspec.structs.fields(cls):
        default, factory = field.default, cast("Any", field.default_factory)
        if default is msgspec.NODEFAULT:
            default = None if factory is msgspec.NODEFAULT else factory()
        own, text = field.encode_name, type_text(field.type)
        fields.append(PolicyField(name=own, type=text, required=field.required, default=default))
    summary = (inspect.getdoc(cls) or "").partition("\n")[0]
    return RegisteredPolicy(
        kind=kind, name=name, target=target, fields=tuple(fields), summary=summary
    )


def type_text(annotation: Any) -> str:
    """Describe a type and its bounds for people: `int, 1 or more`."""
    try:
        schema = msgspec.json.schema(annotation)
    except TypeError:
        return str(annotation)
    known = schema.get("$defs", {})
    options = [
        known.get(option.get("$ref", "").rpartition("/")[2], option)
        for option in schema.get("anyOf", [schema])
        if option.get("type") != "null"
    ]
    return "; ".join(map(_option_text, options))


def _option_text(option: Mapping[str, Any]) -> str:
    if "enum" in option:
        return " or ".join(repr(value) for value in option["enum"])
    if "pattern" in option:
        return str(option["description"])
    texts = [str(option.get("type", "any")).replace("integer", "int").replace("boolean", "bool")]
    inner = option.get("items", option.get("additionalProperties"))
    if isinstance(inner, Mapping) and "pattern" in inner:
        texts[0] += f" of {inner['description']}"
    bounds = dict(option)
    if {"minimum", "maximum"} <= bounds.keys():
        texts.append(f"{bounds.pop('minimum')} to {bounds.pop('maximum')}")
    for key, words in (
        ("minimum", "{} or more"),
        ("exclusiveMinimum", "above {:g}"),
        ("exclusiveMaximum", "below {:g}"),
        ("maximum", "at most {:g}"),
        ("multipleOf", "a multiple of {:g}"),
    ):
        if key in bounds:
            texts.append(words.format(bounds[key]))
    return ", ".join(texts)


def _check_method(cls: type[Policy], kind: str, name: str) -> None:
    base, called = DECISIONS[kind].base, DECISIONS[kind].method
    wanted = inspect.signature(getattr(base, called))
    method = inspect.getattr_static(cls, called)
    label = f"{name}.{called}"
    if kind not in decisions_of(cls):
        raise PolicyError(f"{name}: method `{called}` is missing; define `{called}{wanted}`")
    if not inspect.isfunction(method):
        raise PolicyError(
            f"{label}: a {type(method).__name__}, not a method; define `{called}{wanted}`"
        )
    found = inspect.signature(method)
    if inspect.isgeneratorfunction(method) != DECISIONS[kind].yields or (
        inspect.iscoroutinefunction(method)
    ):
        result = "be a generator function" if DECISIONS[kind].yields else "return a plain value"
        raise PolicyError(f"{label}: must {result}, not a coroutine or a generator")
    try:
        # Called by position, so a class may choose its own parameter names.
        found.bind(*wanted.parameters)
    except TypeError as error:
        raise PolicyError(
            f"{label}: takes `{found}`, the contract calls `{wanted}` ({error})"
        ) from error


@cache
def _registered(group: str) -> tuple[EntryPoint, ...]:
    # Scanning all installed packages takes milliseconds, and nothing is installed while this process runs.
    return tuple(sorted(entry_points(group=group)))


def _group(kind: str) -> str:
    assert kind in (*DECISIONS, SEVERAL), f"no policy kind {kind!r}"
    return f"vsched.{kind}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Sentence, after a space, with the likely spellings of a misspelt word; empty if there are none."""
    close = difflib.get_close_matches(word, list(known), n=3)
    # Keep only the matches that are about as similar as the best one.
    alike = {one: difflib.SequenceMatcher(None, one, word).ratio() for one in close}
    best = [one for one in close if alike[one] > max(alike.values()) - ABOUT]
    return f" Did you mean {' or '.join(best)}?" if best else ""


def _known(group: str) -> str:
    names = ", ".join(point.name for point in _registered(group))
    return f"Known in {group}: {names or 'none (is vsched installed?)'}; or name a class as `package.module:Class`."


def find_registered(group: str, name: str, *, path: str) -> EntryPoint:
    """Return the entry point of a name, without importing its target.

    A policy of the group `vsched.policy`, which makes several decisions, is found in the group of each decision.

    Raises:
        ConfigError: If no entry point, or more than one, has this name; the message starts with `path`.
    """
    groups = [group, _group(SEVERAL)] if group.removeprefix("vsched.") in DECISIONS else [group]
    registered = [point for one in groups for point in _registered(one)]
    points = {point.value: point for point in registered if point.name == name}
    if not points:
        idea = did_you_mean(name, [point.name for point in registered])
        raise ConfigError(f"{path}: {name!r} is unknown. {_known(group)}{idea}")
    if len(points) > 1:
        targets = " and ".join(sorted(points))
        raise ConfigError(
            f"{path}: {name!r} is registered twice, as {targets}; name one of them in full."
        )
    return next(iter(points.values()))


def load_registered(group: str, name: str, *, path: str, extra: str = "") -> object:
    """Import the target of a name: an entry point of the group, or `package.module:Class` itself.

    `extra` is added to the error about a missing module and says which package to install.

    Raises:
        ConfigError: If the name is unknown or cannot be imported; the message starts with `path`.
    """
    target = name if ":" in name else find_registered(group, name, path=path).value
    try:
        return _import(target)
    except ModuleNotFoundError as error:
        remedy = extra or "install its package, or name its folder in PYTHONPATH"
        raise ConfigError(f"{path}: cannot import {target!r}: {error}. Remedy: {remedy}") from error
    except (ImportError, AttributeError, ValueError) as error:
        remedy = ""
        if isinstance(error, AttributeError) and inspect.ismodule(error.obj):
            idea = did_you_mean(error.name or "", vars(error.obj))
            remedy = f". Remedy: name an attribute of the module.{idea}"
        raise ConfigError(f"{path}: cannot import {target!r}: {error}{remedy}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path}: cannot import {target!r}: {described(error)}. Remedy: correct the module"
        ) from error


def _import(target: str) -> object:
    module, _, attribute = target.partition(":")
    found: object = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
