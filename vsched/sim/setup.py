"""Resolve a configuration into simulation inputs: model shape, kernel limits and policies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vsched.assembly import arena_layout, as_served, cached_bytes_per_token, scheduler_limits
from vsched.config import Config, ConfiguredPolicies, LoadedConfig, plain_config, resolve_policies
from vsched.config.devices import assumed
from vsched.config.policies import configured_policies
from vsched.errors import ConfigError, PolicyError
from vsched.kernel import SchedulerLimits
from vsched.plugins import check_contract
from vsched.policy import KERNEL_TABLES, POLICY_TABLES, SEVERAL, Policy, decisions_of
from vsched.sim.cost.model import CostModel
from vsched.types import ModelInfo
from vsched.worker.registry import load_worker


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration ready for simulation."""

    config: Config
    info: ModelInfo
    limits: SchedulerLimits
    policies: ConfiguredPolicies

    @property
    def item_tokens_max(self) -> int:
        """Maximum number of tokens of one image; larger images are scaled down."""
        most = self.info.item_tokens_max
        return min(most, self.policies.item_tokens_max or most)


def prepare(
    config: Config | LoadedConfig,
    cost: CostModel,
    *,
    policies: Mapping[str, Policy] | None = None,
    info: ModelInfo | None = None,
    kv_tokens: int | None = None,
) -> Setup:
    """Resolve a configuration for simulation.

    Args:
        config: The configuration.
        cost: Cost model; also the fallback for the model shape and the KV cache size.
        policies: Replacements for configured policies, as in `simulate`.
        info: The model's shape; by default the cost model's, else the shape of the checkpoint at
            `model.path`.
        kv_tokens: KV cache size of a replica; by default as pinned by `generate.memory`, else the
            cost model's.

    Raises:
        ConfigError: When the shape or the KV cache size is unknown, or settings contradict each
            other.
        PolicyError: When a policy does not implement the contract of its table.
    """
    if isinstance(config, LoadedConfig):
        configured, config = config.policies, assumed(config.config)
    else:
        config = assumed(plain_config(config))
        configured = resolve_policies(config)
    configured = _replace(config, configured, policies or {})
    info = info or cost.shape or inspect_checkpoint(config, config.model.path)
    config, info = as_served(config, info)
    blocks = _kv_tokens(config, info, cost, kv_tokens) // config.generate.block_size
    if blocks < 1:
        raise ConfigError.of_limit(
            "the KV cache holds no block",
            value=f"{blocks} blocks",
            limit=f"at least one, of {config.generate.block_size} tokens",
            remedy="raise generate.memory.tokens or --kv-tokens",
        )
    arena_layout(config, info)  # raises ConfigError if a page does not fit
    limits = scheduler_limits(config, info, configured, blocks=blocks)
    if cost.host.depth:
        limits = msgspec.structs.replace(limits, generate_depth=cost.host.depth)
    return Setup(config=config, info=info, limits=limits, policies=configured)


def _replace(
    config: Config, configured: ConfiguredPolicies, policies: Mapping[str, Policy]
) -> ConfiguredPolicies:
    """Replace some policies, by table, and derive the limits from the result."""
    if not policies:
        return configured
    placed: dict[str, Policy] = {}
    for table, policy in policies.items():
        if table not in KERNEL_TABLES and table != SEVERAL:
            raise ConfigError(
                f"{table}: not a policy table. Remedy: use one of {', '.join((*KERNEL_TABLES, SEVERAL))}"
            )
        if isinstance(policy, type):
            raise PolicyError(
                f"{table}: {policy.__name__} is a class, not an instance. Remedy: pass {policy.__name__}()"
            )
        check_contract(type(policy), POLICY_TABLES.get(table, SEVERAL))
        if table == SEVERAL:
            made = decisions_of(type(policy))
            named = [
                one for one in KERNEL_TABLES if POLICY_TABLES[one] in made and one not in policies
            ]
            placed |= dict.fromkeys(named, policy)
        else:
            placed[table] = policy
    found = configured_policies(config, {**configured.by_table, **placed})
    kept = {one: configured.by_table[one] for one in configured.several}
    return msgspec.structs.replace(found, several=_with_one_state({**kept, **placed}))


def _with_one_state(named: Mapping[str, Policy]) -> tuple[str, ...]:
    """Return the tables that name one object with a state; empty if each object is named once.

    Raises:
        PolicyError: When there are two such objects.
    """
    counts = Counter(id(policy) for policy in named.values() if policy.state_type is not None)
    shared = [one for one, count in counts.items() if count > 1]
    if len(shared) > 1:
        raise PolicyError.of_limit(
            "objects with a state that several tables name",
            value=len(shared),
            limit=1,
            remedy="pass an object of its own for each table",
        )
    return tuple(table for table, policy in named.items() if id(policy) in shared)


def _kv_tokens(config: Config, info: ModelInfo, cost: CostModel, given: int | None) -> int:
    if given is not None:
        return given
    memory = config.generate.memory
    if memory.get("use") == "pinned":
        tokens: int | None = memory.get("tokens")
        return tokens or int(memory["bytes"]) // cached_bytes_per_token(config, info)
    if cost.kv_tokens:
        return cost.kv_tokens
    raise ConfigError(
        "generate.memory: a simulation has no device to measure, and the cost model "
        f"{cost.name} does not define the KV cache size. Remedy: give --kv-tokens, or "
        'generate.memory = {use = "pinned", tokens = ...}'
    )


def inspect_checkpoint(config: Config, path: str | os.PathLike[str]) -> ModelInfo:
    """Return the shape of a checkpoint, read by the configured plug-in without loading weights.

    Raises:
        CheckpointError: When the checkpoint is missing or not supported.
        ConfigError: When no path is given.
    """
    if not str(path):
        raise ConfigError(
            "model.path: neither a checkpoint nor the cost model defines the model's shape. Remedy: set it, or "
            "choose a cost model with a shape (h100-7b, tiny25)"
        )
    plugin = load_worker(config.generate.plugin, path="generate.plugin")
    return plugin.inspect(str(Path(path)), dtype=config.model.dtype, item_tokens_max=0)
