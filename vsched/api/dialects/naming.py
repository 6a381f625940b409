"""Errors with the parameter names of another vendor's API."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from vsched.api.errors import ParameterRefused

_ROOT = re.compile(r"\w+")


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the names of chat parameters, the keys, in errors by those of the client's API.

    Raises:
        ParameterRefused: With the replaced names.
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
