"""Convert the values that a library caller passes to the declared types, once, before anything keeps them.

Records, messages and traces hold plain values and are read back as the declared types. An int in a field of floats, a
numpy number or a subclass of str would come back as another value than the one that was used, or could not be written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import msgspec

from vsched.errors import limit_message

T = TypeVar("T", bound=msgspec.Struct)
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1


class NotPlain(ValueError):
    """A value of a wrong type; `path` names the field, empty for the value as a whole.

    `expected` says what would fit.
    """

    def __init__(self, path: str, value: object, expected: str) -> None:
        super().__init__(f"{path}: {value!r:.200}: {expected}")
        self.path, self.value, self.expected = path, value, expected

    def message(self, remedy: str) -> str:
        """Return the text of the error that a caller gets."""
        return limit_message(
            f"{self.path} is not valid",
            value=f"{self.value!r:.200}",
            limit=self.expected,
            remedy=remedy,
        )


def plain_struct(
    value: msgspec.Struct, wanted: type[T], *, path: str = "", bounds: bool = True
) -> T:
    """Return a struct with the same fields, each converted by `plain_value`; structs within it, too.

    Without `bounds`, those that annotations state are not checked.

    Raises:
        NotPlain: When it is not such a struct, or a field has a wrong type or is out of bounds.
    """
    if not isinstance(value, wanted):
        raise NotPlain(path, value, f"Expected `{wanted.__name__}`")
    prefix = f"{path}." if path else ""
    return wanted(
        **{
            name: plain_value(getattr(value, name), kind, path=f"{prefix}{name}", bounds=bounds)
            for name, kind in _types(wanted, bounds=bounds).items()
        }
    )


@cache
def _types(wanted: type[msgspec.Struct], *, bounds: bool) -> dict[str, Any]:
    """Return the types of the fields of a struct, with their bounds or without."""
    hints = get_type_hints(wanted, include_extras=bounds)
    return {name: hints[name] for name in wanted.__struct_fields__}


def plain_value(value: object, wanted: Any, *, path: str, bounds: bool = True) -> Any:
    """Return a value as the type `wanted`.

    Numpy numbers and arrays, subclasses of str, int and float, and paths become the built-in types, ints floats,
    sequences tuples or lists, and 0 and 1 bools.

    Raises:
        NotPlain: When it is of another type, out of bounds, an int of over 64 bits, or text that UTF-8 cannot hold.
    """
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        return plain_struct(value, wanted, path=path, bounds=bounds)  # type: ignore[arg-type] # it checks that
    bare = wanted.__origin__ if get_origin(wanted) is Annotated else wanted
    try:
        plain = _plain(value)
        if bare is bool and type(plain) is int and plain in (0, 1):
            plain = bool(plain)
        elif type(plain) is bool and bare in (int, float, int | None, float | None):
            plain = int(plain)
        return msgspec.convert(plain, wanted)
    except NotPlain as error:
        raise NotPlain(f"{path}.{error.path}", error.value, error.expected) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPlain(path, value, _in_python(str(error), path)) from None


def _in_python(message: str, path: str) -> str:
    """Return a message of msgspec's, which speaks of JSON, in the caller's terms."""
    for theirs, ours in (("`array`", "`list`"), ("`null`", "`None`"), ("`$", f"`{path}")):
        message = message.replace(theirs, ours)
    return message


def _plain(value: object) -> Any:
    """Return a value in the built-in types; what is of no such kind is left for `msgspec.convert` to refuse."""
    if isinstance(value, str):
        value.encode()
        return str.__str__(value)
    if isinstance(value, msgspec.Struct):
        return plain_struct(value, type(value))
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, int):
        if not _INT_MIN <= value <= _INT_MAX:
            raise ValueError("Expected `int` of 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | range | set | frozenset):
        if set(map(type, value)) == {int} and min(value) >= _INT_MIN and max(value) <= _INT_MAX:
            return list(value)  # prompts are long
        return [_plain(one) for one in value]
    if isinstance(value, os.PathLike):
        return _plain(os.fspath(value))
    to_list = getattr(value, "tolist", None)  # of numpy's numbers and arrays, and those like them
    listed = value if to_list is None else to_list()
    return value if type(listed) is type(value) else _plain(listed)
