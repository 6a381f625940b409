"""The OpenAI-compatible HTTP API of an engine."""

from vsched.api.app import create_app
from vsched.api.contract import ApiSettings, Generation

__all__ = ["ApiSettings", "Generation", "create_app"]
