"""Base class of the configuration tables, and types of keys that several tables use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar, cast

import msgspec

from vsched.policy import DECISIONS

PolicyTable = dict[str, Any]
"""`{use = "name", **fields}`: a registered policy or `my_pkg.module:Class`, and its fields."""

Size = int | str
"""Bytes: a number, or text such as `4GiB`."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file."""


Keys = TypeVar("Keys", bound=msgspec.Struct)


def with_policy_tables(section: str) -> Callable[[type[Keys]], type[Keys]]:
    """Add the policy tables of a section to its class, as the decisions declare them.

    In the classes, policy tables are listed for type checkers only.
    """

    def add(cls: type[Keys]) -> type[Keys]:
        tables = [table for decision in DECISIONS.values() for table in decision.selected_by]
        keys: list[Any] = [
            (
                name,
                Annotated[PolicyTable, msgspec.Meta(description=table.description)],
                msgspec.field(default_factory=partial(dict, use=table.use)),
            )
            for table in tables
            for parent, _, name in (table.path.rpartition("."),)
            if parent == section
        ]
        whole = msgspec.defstruct(
            cls.__name__,
            keys,
            bases=(cls,),
            module=cls.__module__,
            namespace={"__doc__": cls.__doc__, "__qualname__": cls.__qualname__},
            frozen=True,
            kw_only=True,
        )
        return cast("type[Keys]", whole)

    return add
