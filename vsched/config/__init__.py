"""The configuration: its sections, loading, policies and documentation."""

from vsched.config.document import keys_table, to_toml, toml_value
from vsched.config.loading import LoadedConfig, load_config, plain_config
from vsched.config.policies import ConfiguredPolicies, resolve_policies
from vsched.config.sections import (
    ArenaConfig,
    Config,
    DeadlinesConfig,
    EncodeConfig,
    GenerateConfig,
    MediaConfig,
    ModelConfig,
    RecordConfig,
    ServerConfig,
)

__all__ = [
    "ArenaConfig",
    "Config",
    "ConfiguredPolicies",
    "DeadlinesConfig",
    "EncodeConfig",
    "GenerateConfig",
    "LoadedConfig",
    "MediaConfig",
    "ModelConfig",
    "RecordConfig",
    "ServerConfig",
    "keys_table",
    "load_config",
    "plain_config",
    "resolve_policies",
    "to_toml",
    "toml_value",
]
