"""Conversion of values that a library caller passes to the declared types, before they are stored.

Records, messages and traces hold built-in types and are decoded as the declared types. An int in a float field, a numpy
number or a subclass of str would be decoded as a different value from the one used, or could not be encoded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_origin, get_type_hints

import msgspec

from vsched.errors import limit_message

T = TypeVar("T", bound=msgspec.Struct)
K = TypeVar("K")
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1
_NUMBERS = (int, float, int | None, float | None)
_building = threading.Lock()


def shared_decoder(kind: type[K]) -> msgspec.json.Decoder[K]:
    """Return the decoder of a type that several threads decode or convert to; they call this first.

    msgspec builds a type when it is first used, and two such uses at a time crash the process.
    """
    with _building:
        return _decoder(cast("Any", kind))


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


class InvalidValue(ValueError):
    """A value has the wrong type or is out of bounds.

    Attributes:
        path: The field; empty for the value as a whole.
        value: The value that was passed.
        expected: The expected type or bound.
    """

    def __init__(self, path: str, value: object, expected: str) -> None:
        super().__init__(f"{path}: {value!r:.200}: {expected}")
        self.path, self.value, self.expected = path, value, expected

    def message(self, remedy: str) -> str:
        """Return the error message for the caller."""
        return limit_message(
            f"{self.path} is not valid",
            value=f"{self.value!r:.200}",
            limit=self.expected,
            remedy=remedy,
        )


def plain_struct(
    value: msgspec.Struct, wanted: type[T], *, path: str = "", bounds: bool = True
) -> T:
    """Return a copy of a struct with each field converted by `plain_value`, including nested structs.

    With `bounds=False`, the bounds in annotations (`msgspec.Meta`) are not checked.

    Raises:
        InvalidValue: When the value is not a `wanted`, or a field has the wrong type or is out of bounds.
    """
    if not isinstance(value, wanted):
        raise InvalidValue(path, value, f"Expected `{wanted.__name__}`")
    prefix = f"{path}." if path else ""
    return wanted(
        **{
            name: plain_value(getattr(value, name), kind, path=f"{prefix}{name}", bounds=bounds)
            for name, kind in field_types(wanted, bounds=bounds).items()
        }
    )


@cache
def field_types(wanted: type[msgspec.Struct], *, bounds: bool = True) -> dict[str, Any]:
    """Return the field types of a struct, with or without the bounds in annotations."""
    hints = get_type_hints(wanted, include_extras=bounds)
    return {name: hints[name] for name in wanted.__struct_fields__}


def plain_value(value: object, wanted: Any, *, path: str, bounds: bool = True) -> Any:
    """Convert a value to the type `wanted`.

    Numpy numbers and arrays, subclasses of str, int and float, and paths are converted to built-in types; then ints to
    floats, sequences to tuples or lists, and 0 and 1 to bools where `wanted` says so.

    Raises:
        InvalidValue: When it has another type, is out of bounds, is an int beyond 64 bits, or is text that UTF-8 cannot
            encode.
    """
    if type(value) is wanted and wanted in (bool, float):
        return value  # most fields of most requests
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        return plain_struct(value, wanted, path=path, bounds=bounds)  # type: ignore[arg-type] # checked there
    bare = wanted.__origin__ if get_origin(wanted) is Annotated else wanted
    try:
        plain = _plain(value)
        if bare is bool and type(plain) is int and plain in (0, 1):
            plain = bool(plain)
        elif type(plain) is bool and bare in _NUMBERS:
            plain = int(plain)
        return msgspec.convert(plain, wanted)
    except InvalidValue as error:
        raise InvalidValue(f"{path}.{error.path}", error.value, error.expected) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValue(path, value, _in_python(str(error), path)) from None


def _in_python(message: str, path: str) -> str:
    """Replace the JSON terms in an error message of msgspec by Python's."""
    for theirs, ours in (("`array`", "`list`"), ("`null`", "`None`"), ("`$", f"`{path}")):
        message = message.replace(theirs, ours)
    return message


def _plain(value: object) -> Any:
    """Convert a value to built-in types; others are returned unchanged, and `msgspec.convert` refuses them."""
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
    to_list = getattr(value, "tolist", None)  # numpy numbers and arrays, and compatible types
    listed = value if to_list is None else to_list()
    return value if type(listed) is type(value) else _plain(listed)
