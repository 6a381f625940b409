"""The policies that a configuration names, built and checked, and the combinations of keys that cannot be."""

from __future__ import annotations

from typing import cast

import msgspec

from vsched.config.byte_sizes import size_bytes
from vsched.config.media import check_decode_bytes
from vsched.config.sections import POLICY_TABLES, Config, PolicyTable
from vsched.errors import ConfigError, limit_message
from vsched.plugins import check_worker_name, resolve_policy
from vsched.policy import (
    AdmissionPolicy,
    EncodingPolicy,
    EvictionPolicy,
    MemoryPolicy,
    Policy,
    PreemptionPolicy,
    RoutingPolicy,
)

ENCODE_ITEMS_MAX = 8
"""Most items of an encoder step where the admission policy sets no `max_items` of its own."""
ENCODE_ITEMS_MAX_CPU = 1
"""The same on a CPU: from 64 tokens on, a batch takes as long as its images one by one, and all would wait for it."""


class ConfiguredPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """One policy for each policy table of the configuration.

    Attributes:
        item_tokens_max: Most tokens of one image, None for no limit. It is the token budget of `encode.admission`
            (one knob, A12), derived and normalised here so that no reader sees a 0 (A13).
        encode_items_max: Most items of one encoder step of one replica.
    """

    encode_admission: AdmissionPolicy
    encoding: EncodingPolicy
    encode_eviction: EvictionPolicy
    generate_admission: AdmissionPolicy
    memory: MemoryPolicy
    preemption: PreemptionPolicy
    generate_eviction: EvictionPolicy
    routing: RoutingPolicy
    item_tokens_max: int | None
    encode_items_max: int

    def by_table(self) -> dict[str, Policy]:
        """Return the policies under the paths of their tables."""
        return {
            "encode.admission": self.encode_admission,
            "encode.encoding": self.encoding,
            "encode.eviction": self.encode_eviction,
            "generate.admission": self.generate_admission,
            "generate.memory": self.memory,
            "generate.preemption": self.preemption,
            "generate.eviction": self.generate_eviction,
            "routing": self.routing,
        }


def resolve_policies(config: Config) -> ConfiguredPolicies:
    """Build every policy that the configuration names.

    Raises:
        ConfigError: When a name or a field is unknown, or a value is out of bounds.
        PolicyError: When a class does not meet its contract.
    """
    built = {
        path: resolve_policy(kind, policy_table(config, path), path=path)
        for path, kind in POLICY_TABLES.items()
    }
    encode_admission = built["encode.admission"]
    items_max = getattr(encode_admission, "max_items", None)
    if items_max is None:
        items_max = ENCODE_ITEMS_MAX_CPU if config.encode.device == "cpu" else ENCODE_ITEMS_MAX
    item_tokens_max = getattr(encode_admission, "max_tokens", 0)
    if item_tokens_max is None:
        item_tokens_max = config.generate.max_batch_tokens
    return ConfiguredPolicies(
        encode_admission=cast("AdmissionPolicy", encode_admission),
        encoding=cast("EncodingPolicy", built["encode.encoding"]),
        encode_eviction=cast("EvictionPolicy", built["encode.eviction"]),
        generate_admission=cast("AdmissionPolicy", built["generate.admission"]),
        memory=cast("MemoryPolicy", built["generate.memory"]),
        preemption=cast("PreemptionPolicy", built["generate.preemption"]),
        generate_eviction=cast("EvictionPolicy", built["generate.eviction"]),
        routing=cast("RoutingPolicy", built["routing"]),
        item_tokens_max=item_tokens_max or None,
        encode_items_max=items_per_replica(items_max, config.encode.replicas),
    )


def items_per_replica(items: int, replicas: int) -> int:
    """Return the share of one replica in a batch cap: at least 1 (A11)."""
    return max(items // replicas, 1)


def policy_table(config: Config, path: str) -> PolicyTable:
    """Return the policy table at a path."""
    found: object = config
    for part in path.split("."):
        found = getattr(found, part)
    return cast("PolicyTable", found)


def check_combinations(config: Config) -> None:
    """Refuse values that are legal each, but not together.

    Raises:
        ConfigError: Starts with the path of the key to change.
    """
    check_decode_bytes(config.media)
    check_together(config)
    generate = config.generate
    check_sizes(config)
    for stage, name in ((config.encode, "encode"), (generate, "generate")):
        check_worker_name(stage.plugin, path=f"{name}.plugin")
    _at_most(
        "generate.chunk_tokens",
        generate.chunk_tokens,
        generate.max_batch_tokens,
        "a chunk cannot be longer than a step (generate.max_batch_tokens)",
    )
    _at_most(
        "generate.slots",
        generate.slots,
        generate.max_batch_tokens - 1,
        "a step full of decodes must leave room for prefill (generate.max_batch_tokens)",
    )
    _at_most(
        "deadlines.heartbeat_s",
        config.deadlines.heartbeat_s,
        config.deadlines.rank_timeout_s / 2,
        "a rank must not time out over one late heartbeat (half of deadlines.rank_timeout_s)",
    )


def check_together(config: Config) -> None:
    """Refuse stages that are to share processes and differ in how many there are.

    Raises:
        ConfigError: With value, limit and remedy.
    """
    if config.placement != "together":
        return
    for key in ("replicas", "tensor_parallel"):
        encode, generate = getattr(config.encode, key), getattr(config.generate, key)
        if encode != generate:
            what = f"encode.{key}: with placement = together both stages run in the same processes"
            remedy = f"set encode.{key} and generate.{key} to the same, or placement to separate"
            limit = f"generate.{key}, which is {generate}"
            raise ConfigError(limit_message(what, value=encode, limit=limit, remedy=remedy))


def check_sizes(config: Config) -> None:
    """Refuse sizes that cannot be read."""
    for path, size in (
        ("encode.memory_limit", config.encode.memory_limit),
        ("generate.memory_limit", config.generate.memory_limit),
        ("encode.reserved", config.encode.reserved or 0),
    ):
        if size != "auto" or path == "encode.reserved":
            size_bytes(size, path=path)


def _at_most(path: str, value: float, limit: float, reason: str) -> None:
    if value > limit:
        remedy = f"set {path} to {limit:g} or less"
        raise ConfigError(
            limit_message(f"{path}: {reason}", value=value, limit=limit, remedy=remedy)
        )
