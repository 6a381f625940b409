"""Byte sizes with units."""

from __future__ import annotations

import re

from vsched.errors import ConfigError, limit_message

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def size_bytes(size: int | str, *, path: str) -> int:
    """Parse a number of bytes, or a text such as `1.5GiB`.

    Raises:
        ConfigError: If it is not a size; the message starts with `path`.
    """
    found = _FORM.fullmatch(str(size))
    if found is None or found[2] not in _UNITS:
        raise ConfigError(
            limit_message(
                f"{path}: not a size",
                value=repr(size),
                limit=f"a number, or one with a unit ({', '.join(filter(None, _UNITS))})",
                remedy="write it like 4GiB",
            )
        )
    return int(float(found[1]) * _UNITS[found[2]])
