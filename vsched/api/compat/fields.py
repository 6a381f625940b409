"""Fields that other vendors' requests share with chat requests, and their conversion."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from vsched.api.errors import ParameterRefused
from vsched.api.request_schema import (
    ChatRequest,
    CommonFields,
    MediaArguments,
    ProcessorArguments,
    TemplateArguments,
)


class ChatFields(CommonFields, kw_only=True):
    """Fields with the same names as in chat requests."""

    chat_template_kwargs: TemplateArguments | None = None
    mm_processor_kwargs: ProcessorArguments | None = None
    media_io_kwargs: MediaArguments | None = None


def shared_fields(request: msgspec.Struct, *, but: AbstractSet[str]) -> dict[str, Any]:
    """Fields that have the same name in a chat request, except for `but`, whose meaning or type differs."""
    names = set(request.__struct_fields__) & set(ChatRequest.__struct_fields__)
    return {name: getattr(request, name) for name in sorted(names - but)}


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
