"""Base class of the configuration tables, and types of keys that several tables use."""

from __future__ import annotations

from typing import Any

import msgspec

PolicyTable = dict[str, Any]
"""`{use = "name", **fields}`: a registered policy or `my_pkg.module:Class`, and its fields."""

Size = int | str
"""Bytes: a number, or text such as `4GiB`."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file."""
