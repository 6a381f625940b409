"""What all tables of the configuration have in common, and the types that several have keys of."""

from __future__ import annotations

from typing import Any

import msgspec

PolicyTable = dict[str, Any]
"""`{use = "name", **fields}`: a registered policy or `my_pkg.module:Class`, and its fields."""

Size = int | str
"""Bytes: a number, or text such as `4GiB`."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file."""
