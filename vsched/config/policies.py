"""Build and check the configured policies.

The tables of a vsched configuration that another host of policies follows, such as vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta

from vsched.config.devices import assumed
from vsched.config.sections import (
    Config,
    PoliciesConfig,
    PolicyTable,
    Section,
    ServerConfig,
    VllmConfig,
)
from vsched.errors import ConfigError, ConfigProblems, PolicyError, described, reraise_interrupt
from vsched.plugins import did_you_mean, resolve_policy, resolve_several, seats_of
from vsched.policy import (
    KERNEL_TABLES,
    POLICY_TABLES,
    SEVERAL,
    EncodeLimits,
    MemoryPolicy,
    Policy,
    PruningPolicy,
    RequestPolicy,
    join_seats,
    shares_policy,
    without_seats,
)
from vsched.policy.requests import check_encode_limits
from vsched.policy_host import HostCapabilities, SeatPolicies, check_capabilities, check_table
from vsched.policy_host.seats import PolicyMemory

ENCODE_ITEMS_MAX = 8
"""Maximum number of images in an encode step if the admission policy sets no limit."""
ENCODE_ITEMS_MAX_CPU = 1
"""The same on a CPU: from 64 tokens per image on, batching saves no time and delays the first images."""


class ConfiguredPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """One policy for each seat.

    Attributes:
        by_table: The policies by the paths of their tables. One that makes several decisions occurs several times.
        several: Tables whose decisions the policy of the table `policy` makes.
        item_tokens_max: Maximum tokens of one image, None for no limit; it is never 0.
        encode_items_max: Maximum number of images in an encode step of one replica.
    """

    by_table: Mapping[str, Policy]
    item_tokens_max: int | None
    encode_items_max: int
    several: Sequence[str] = ()

    def for_kernel(self) -> SeatPolicies:
        """The policies that the kernel calls."""
        several = self.by_table[self.several[0]] if self.several else None
        return SeatPolicies(by_table=self.by_table, several=several, build=resolve_policy)

    @property
    def memory(self) -> MemoryPolicy:
        """The policy that sizes the KV cache, before there is a kernel."""
        return cast("MemoryPolicy", self.by_table["generate.memory"])

    @property
    def pruning(self) -> PruningPolicy:
        """The policy that prunes videos while they are prepared."""
        return cast("PruningPolicy", self.by_table["media.pruning"])


def resolve_policies(config: Config) -> ConfiguredPolicies:
    """Build every configured policy.

    Raises:
        ConfigError: If names or fields are unknown, or values out of bounds; all errors are reported.
        PolicyError: If a class cannot make its decision.
    """
    problems = ConfigProblems()
    built: dict[str, Policy] = {}
    for path, kind in POLICY_TABLES.items():
        with problems.collected():
            built[path] = resolve_policy(kind, policy_table(config, path), path=path)
    several: Mapping[str, Policy] = {}
    if config.policy:
        with problems.collected():
            several = _several(config)
    problems.raise_all()
    found = configured_policies(config, {**built, **several})
    return msgspec.structs.replace(found, several=tuple(several))


def check_needs(config: Config, policies: Mapping[str, Policy]) -> None:
    """Refuse policies that swap if there is no swap space."""
    for path, policy in policies.items() if not config.generate.swap_memory else ():
        if "swap" in policy.needs():
            what = f"{path}: {type(policy).__name__} with these fields needs swap space"
            raise PolicyError(f"{what}. Remedy: set generate.swap_memory, or use another policy")


def _several(config: Config) -> dict[str, Policy]:
    """Build the policy that makes several decisions with one state; return it by the tables that it stands for."""
    policy, named = resolve_several(config.policy)
    for path in named:
        if policy_table(config, path) != policy_table(Config(), path):
            raise ConfigError(
                f"{path}: both this table and policy name a policy. Remedy: leave {path} out, or set policy.seats to "
                f"the tables that {config.policy['use']} stands for"
            )
    return dict.fromkeys(named, policy)


def check_replacement(
    config: Config, current: ConfiguredPolicies, changes: Mapping[str, Policy | PolicyTable]
) -> tuple[dict[str, PolicyTable], ConfiguredPolicies]:
    """Build the policies of these tables, and check that they may replace the current ones while requests run.

    Returns the tables, with `policy.seats` filled in, and the policies of all seats with them. A policy stands for its
    own table, which names its class as `module:Class`.

    Raises:
        ConfigError: If a table or a policy is not valid, or needs a restart; each line starts with a table's path.
        PolicyError: If a class cannot make its decision, or needs swap space and there is none.
    """
    problems = ConfigProblems()
    checked: dict[str, PolicyTable] = {}
    built: dict[str, Policy] = {}
    for path, change in join_seats(changes).items():
        with problems.collected():
            if isinstance(change, Policy):
                cls, fields = type(change), msgspec.to_builtins(change)
                table: PolicyTable = {"use": f"{cls.__module__}:{cls.__qualname__}", **fields}
            else:
                table = change
            seats, policy = _check_table(path, table)
            twice = sorted({*seats} & {*built})
            if twice:
                raise ConfigError(
                    f"{path}: also named in this change for {', '.join(twice)}. Remedy: name each once"
                )
            built |= dict.fromkeys(seats, policy)
            checked[path] = {**table, "seats": seats} if path == SEVERAL else dict(table)
    problems.raise_all()
    if not checked:
        raise ConfigError("no policy is named. Remedy: name tables, such as generate.step")
    check_needs(config, built)
    after = configured_policies(config, {**current.by_table, **built})
    allowed, tokens = current.item_tokens_max, after.item_tokens_max
    if tokens is not None and (allowed is None or tokens < allowed):
        limit = (
            "no limit on an image's tokens"
            if allowed is None
            else f"{allowed} tokens of an image or more"
        )
        raise _needs_restart(
            "encode.admission", f"{tokens} tokens of an image", f"{limit}, as at the start"
        )
    return checked, msgspec.structs.replace(current, by_table=after.by_table)


def _check_table(path: str, table: object) -> tuple[list[str], Policy]:
    """Return the seats and the policy of a table that replaces another while requests run."""
    able = sorted({*KERNEL_TABLES, SEVERAL})
    if path in POLICY_TABLES and path not in able:
        limit = "the policy of the start, which is not called by the scheduler"
        raise _needs_restart(path, "another policy", limit)
    if path not in able:
        what = f"{path}: not a policy table"
        raise ConfigError.of_limit(
            what,
            value=repr(path),
            limit=", ".join(able),
            remedy=f"name one of them.{did_you_mean(path, able)}",
        )
    if not isinstance(table, Mapping):
        what = f"{path}: not a table"
        raise ConfigError.of_limit(
            what, value=repr(table), limit='{"use": "NAME"}', remedy="name a policy"
        )
    several = path == SEVERAL
    decision = SEVERAL if several else POLICY_TABLES[path]
    fields = without_seats(table) if several else table
    policy = resolve_policy(decision, fields, path=path)
    try:
        msgspec.msgpack.encode(table)  # an event has it
        PolicyMemory(policy)
    except (PolicyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {error}") from error
    outside = sorted({*POLICY_TABLES} - {*KERNEL_TABLES})
    return seats_of(policy, table, without=outside) if several else [path], policy


def policy_tables(
    config: Config, policies: ConfiguredPolicies, installed: Mapping[str, PolicyTable]
) -> dict[str, PolicyTable]:
    """Return the table of the policy that decides for each policy table: configured, or installed since.

    `seats` of a table are those for which its policy still decides and may be replaced.
    """
    found = {path: policy_table(config, path) for path in POLICY_TABLES}
    configured = {**config.policy, "seats": [*policies.several]}
    found |= {**dict.fromkeys(policies.several, configured), **installed}
    shown = dict(found)
    for path, table in found.items():
        if shares_policy(path, table):
            seats = [one for one in table["seats"] if one in KERNEL_TABLES and found[one] == table]
            shown[path] = {**table, "seats": seats}
    return shown


def _needs_restart(path: str, value: str, limit: str) -> ConfigError:
    what = f"{path}: cannot be replaced while requests run"
    return ConfigError.of_limit(
        what, value=value, limit=limit, remedy="change the configuration and restart"
    )


def configured_policies(config: Config, built: Mapping[str, Policy]) -> ConfiguredPolicies:
    """Combine the policies in `built`, by table, with the limits derived from them; `auto` counts as `cpu`."""
    config = assumed(config)
    limits = _encode_limits(cast("RequestPolicy", built["encode.admission"]))
    items_max, item_tokens_max = limits.images, limits.tokens
    if items_max is None:
        items_max = ENCODE_ITEMS_MAX_CPU if config.encode.on_cpu else ENCODE_ITEMS_MAX
    if item_tokens_max is None:
        item_tokens_max = config.generate.max_batch_tokens
    return ConfiguredPolicies(
        by_table=built,
        item_tokens_max=item_tokens_max or None,
        encode_items_max=max(items_max // max(config.encode.replicas, 1), 1),
    )


def _encode_limits(policy: RequestPolicy) -> EncodeLimits:
    try:
        return check_encode_limits(policy.encode_limits())
    except BaseException as error:  # a user's method may raise anything
        reraise_interrupt(error)
        raise PolicyError(
            f"encode.admission: no limits by {type(policy).__name__}.encode_limits: {described(error)}. Remedy: "
            "return EncodeLimits with at least 1 image, and 0 tokens for no limit"
        ) from error


def policy_table(config: Config, path: str) -> PolicyTable:
    """Return the policy table at a path."""
    found: object = config
    for part in path.split("."):
        found = getattr(found, part)
    return cast("PolicyTable", found)


class TimeTarget(Section, frozen=True, kw_only=True):
    """The keys of the table `generate` that concern other hosts."""

    step_target_ms: Annotated[float, Meta(ge=0)] = 0.0
    prefill_target_ms: Annotated[float, Meta(ge=0)] = 0.0
    step_target_ratio: Annotated[float, Meta(ge=1.5)] = 8.0


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Policies and limits of a host.

    Attributes:
        rest: The tables and keys that do not concern policies.
    """

    policies: SeatPolicies
    server: ServerConfig = ServerConfig()
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
        if (table := _pop_table(rest, path)) is not None:
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
    rest["generate"] = generate
    sections: dict[str, Any] = {}
    for path, field, wanted, section in (
        ("generate", "target", TimeTarget, keys),
        ("policies", "limits", PoliciesConfig, rest.pop("policies", {})),
        ("server", "server", ServerConfig, rest.pop("server", {})),
        ("vllm", "vllm", VllmConfig, rest.pop("vllm", {})),
    ):
        try:
            sections[field] = msgspec.convert(section, wanted)
        except msgspec.ValidationError as error:
            problems.add(f"{path}: {error}. Remedy: see the keys of vsched's configuration")
    problems.raise_all()
    by_table = {path: one for path, one in built.items() if path in called}
    policies = SeatPolicies(by_table=by_table, several=shared)
    return HostSettings(policies=policies, rest=rest, **sections)


def _pop_table(tables: dict[str, Any], path: str) -> Any:
    """Remove and return the table at a path; None without one. The given tables are not changed."""
    head, _, last = path.rpartition(".")
    if not head:
        return tables.pop(last, None)
    inner = tables.get(head)
    if not isinstance(inner, Mapping) or last not in inner:
        return None
    tables[head] = {key: value for key, value in inner.items() if key != last}
    return inner[last]
