"""Compilation of kernels, and calls of kernels by address."""

# numba compiles these functions: to a type checker they are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numba
import numpy as np
from numba.core import cgutils

from vsched_workers.backends.cpu.kernel_store import keep_on_disk

_FUNCTIONS: list[Any] = []
"""All compiled functions, as numba dispatchers."""


def kernels_here() -> Mapping[str, int]:
    """Number of compiled argument types of each function in this process, whether compiled here or read from disk."""
    found: Counter[str] = Counter()
    for each in _FUNCTIONS:
        found[f"{each.__module__.rpartition('.')[2]}.{each.__qualname__}"] += len(each.overloads)
    return found


def compiled(**given: Any) -> Callable[[Any], Any]:
    """Compile a function on its first call, or load it from the kernel store on disk.

    The error model is numpy's: a division that may raise is not vectorized. `fastmath` may be a set of LLVM flags.
    """
    options: dict[str, Any] = {"fastmath": True, "nogil": True, "error_model": "numpy"} | given

    def compile_function(function: Any) -> Any:
        dispatcher = numba.njit(**options)(function)
        keep_on_disk(dispatcher)
        _FUNCTIONS.append(dispatcher)
        return dispatcher

    return compile_function


def emits(returns: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: make a function that emits LLVM IR callable from compiled code.

    The decorated function takes LLVM's builder and the values of the arguments, and returns the value of the call.

    Args:
        returns: numba type of the result; None for the type of the first argument.
        parameters: numba types of the arguments. None accepts any type: the decorated function then gets the type
            instead of a value, so that the emitted instructions can depend on it. A class of named tuples accepts one
            with integers: the decorated function gets one with their values.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def definition(_context: Any, *given: Any) -> Any:
            accepted = [
                kind if isinstance(parameter, type) else parameter or kind
                for parameter, kind in zip(parameters, given, strict=True)
            ]

            def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                def passed(parameter: Any, kind: Any, value: Any) -> Any:
                    if not isinstance(parameter, type):
                        return value if parameter else kind
                    fields = zip(cgutils.unpack_tuple(builder, value), kind, strict=True)
                    return parameter(*(context.cast(builder, *one, numba.intp) for one in fields))

                arguments = zip(parameters, given, values, strict=True)
                return emit(builder, *(passed(*each) for each in arguments))

            return (returns or given[0])(*accepted), generate

        functools.update_wrapper(definition, emit, assigned=("__name__", "__qualname__", "__doc__"))
        return numba.extending.intrinsic(definition)

    return decorate


def kernel(*parameters: Any) -> Callable[[Any], Any]:
    """Compile a function as `compiled`, and let compiled code call it by an address that is known only at run time.

    A kernel called by name is compiled into its caller once more, and may round differently there. A kernel called by
    address is compiled once for all callers. `parameters` are the numba types of its parameters; None accepts any type.
    The kernel gets two attributes:

    - `address_of(*given)`: its address, compiled first if necessary; `given` are arguments for the parameters of any
      type, in their order.
    - `call`: for compiled code, takes the address of this or of another kernel with these parameters, and arguments.
    """

    def compile_kernel(function: Any) -> Any:
        dispatcher = compiled()(function)

        def address_of(*given: Any) -> int:
            others = iter(given)
            kinds = tuple(each or numba.typeof(next(others)) for each in parameters)
            dispatcher.compile(kinds)
            made = dispatcher.overloads[kinds]
            address: int = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
            return address

        dispatcher.address_of, dispatcher.call = address_of, _call_by_address(parameters)
        return dispatcher

    return compile_kernel


def _call_by_address(parameters: Sequence[Any]) -> Any:
    def definition(_context: Any, _address: Any, *given: Any) -> Any:
        kinds = [parameter or kind for parameter, kind in zip(parameters, given, strict=True)]

        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            convention = context.call_conv
            kind = convention.get_function_type(numba.types.none, kinds)
            kernel = builder.inttoptr(values[0], kind.as_pointer())
            status, _ = convention.call_function(
                builder, kernel, numba.types.none, kinds, values[1:]
            )
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return numba.types.none(numba.intp, *kinds), generate

    # numba reads the parameter names of the function from its signature.
    names = ["context", "address", *(f"given_{place}" for place, _ in enumerate(parameters))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    described: Any = definition
    described.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return numba.extending.intrinsic(definition)


LONG, SINGLE = numba.int64, numba.float32


def array_of(dtype: Any, dimensions: int = 1) -> Any:
    """Type of a contiguous array."""
    return numba.typeof(np.empty((1,) * dimensions, dtype=dtype))
