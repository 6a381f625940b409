"""Configurations as a command line would have them."""

from __future__ import annotations

from vsched.config import Config, load_config


def config_of(*sets: str) -> Config:
    """Return the default configuration with some keys set."""
    return load_config(None, sets=sets, environ={}).config
