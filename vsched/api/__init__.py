"""The OpenAI-compatible HTTP API of an engine."""

from vsched.api.app import create_app
from vsched.api.contract import ApiSettings, EngineContract, Generation

__all__ = ["ApiSettings", "EngineContract", "Generation", "create_app"]
