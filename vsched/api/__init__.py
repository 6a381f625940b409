"""The OpenAI-compatible HTTP API of an engine."""

from vsched.api.app import create_app
from vsched.api.contract import ApiSettings, GenerationContract

__all__ = ["ApiSettings", "GenerationContract", "create_app"]
