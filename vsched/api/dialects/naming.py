"""Refusals by the names that a dialect has for parameters."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from vsched.api.errors import ParameterRefused

_ROOT = re.compile(r"\w+")


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Word refusals of a chat's parameters, the keys, by the names that a client knows.

    Raises:
        ParameterRefused: In these names.
    """
    try:
        yield
    except ParameterRefused as error:
        root = _ROOT.match(error.param or "")
        if root is None or root[0] not in names:
            raise
        name = names[root[0]]
        raise ParameterRefused(
            error.message.replace(f"`{root[0]}", f"`{name}"),
            param=name + (error.param or "")[root.end() :],
            code=error.code,
            status=error.status,
        ) from None
