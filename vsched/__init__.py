"""vsched serves vision-language models: a deterministic scheduler with interchangeable policies.

The names here are the library's public face; the command line is `vsched`.
"""

from vsched.config import Config
from vsched.engine import Engine
from vsched.errors import (
    ConfigError,
    DeviceOutOfMemory,
    GroupLost,
    MemoryLeak,
    RankDesync,
    RequestRefused,
    VschedError,
)
from vsched.types import MediaItem, Request, SamplingParams

__all__ = [
    "Config",
    "ConfigError",
    "DeviceOutOfMemory",
    "Engine",
    "GroupLost",
    "MediaItem",
    "MemoryLeak",
    "RankDesync",
    "Request",
    "RequestRefused",
    "SamplingParams",
    "VschedError",
]
