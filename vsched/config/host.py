"""The tables of a vsched configuration that another host of policies follows, such as vLLM."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from vsched.config.section import Section
from vsched.config.sections import PoliciesConfig, VllmConfig
from vsched.errors import ConfigError, ConfigProblems
from vsched.plugins import resolve_policy, resolve_several
from vsched.policy import POLICY_TABLES, SEVERAL, Policy
from vsched.policy_host import HostCapabilities, SeatPolicies, check_capabilities, check_table

_Section = TypeVar("_Section", bound=Section)


class TimeTarget(Section, frozen=True, kw_only=True):
    """The keys of the table `generate` that concern other hosts."""

    step_target_ms: Annotated[float, Meta(ge=0)] = 0.0
    step_target_ratio: Annotated[float, Meta(ge=1.5)] = 8.0


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Policies and limits of a host.

    Attributes:
        rest: The tables and keys that do not concern policies.
    """

    policies: SeatPolicies
    vllm: VllmConfig = VllmConfig()
    limits: PoliciesConfig = PoliciesConfig()
    target: TimeTarget = TimeTarget()
    rest: Mapping[str, Any] = {}


def read_host_settings(
    tables: Mapping[str, Any], able: HostCapabilities, called: Collection[str]
) -> HostSettings:
    """Build the policies of the tables `called`, and check that the host can follow those of all tables.

    Raises:
        ConfigError: If a table or a value is not valid.
        PolicyError: If a policy needs a feature that the host lacks.
    """
    rest, built, problems = dict(tables), dict[str, Policy](), ConfigProblems()
    for path, kind in POLICY_TABLES.items():
        if (table := _take(rest, path)) is not None:
            with problems.collected():
                check_table(path, able)
                built[path] = resolve_policy(kind, table, path=path)
                check_capabilities(built[path], path, able)
    shared: Policy | None = None
    if several := rest.pop(SEVERAL, None):
        with problems.collected():
            shared, named = resolve_several(several)
            if "seats" not in several:
                named = [path for path in named if path in able.tables and path not in built]
            for path in named:
                if path in built:
                    raise ConfigError(
                        f"{path}: both this table and policy name a policy. Remedy: leave one out"
                    )
                check_capabilities(shared, path, able)
                built[path] = shared
    generate = dict(rest.get("generate", {}))
    keys = {key: generate.pop(key) for key in TimeTarget.__struct_fields__ if key in generate}
    target, limits, vllm = TimeTarget(), PoliciesConfig(), VllmConfig()
    rest["generate"] = generate
    with problems.collected():
        target = _convert(keys, TimeTarget, "generate")
    with problems.collected():
        limits = _convert(rest.pop("policies", {}), PoliciesConfig, "policies")
    with problems.collected():
        vllm = _convert(rest.pop("vllm", {}), VllmConfig, "vllm")
    problems.tell()
    by_table = {path: one for path, one in built.items() if path in called}
    return HostSettings(
        policies=SeatPolicies(by_table=by_table, several=shared),
        vllm=vllm,
        limits=limits,
        target=target,
        rest=rest,
    )


def _take(tables: dict[str, Any], path: str) -> Any:
    """Remove and return the table at a path; None without one. The given tables are not changed."""
    head, _, last = path.rpartition(".")
    if not head:
        return tables.pop(last, None)
    inner = tables.get(head)
    if not isinstance(inner, Mapping) or last not in inner:
        return None
    tables[head] = {key: value for key, value in inner.items() if key != last}
    return inner[last]


def _convert(table: object, wanted: type[_Section], path: str) -> _Section:
    try:
        return msgspec.convert(table, wanted)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: {error}. Remedy: see the keys of vsched's configuration"
        ) from error
