"""Launches of compiled Triton kernels without Triton's own dispatch.

For every launch, Triton binds the arguments, derives the specialization from them and looks it up, which takes several
times as long as the launch itself. In eager steps, with several launches per layer, the device then waits for the host.
Here the specialization is looked up by the properties that Triton specializes on: data types, alignment to 16 bytes,
and for integers divisibility by 16 and equality to 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Grid = Sequence[int]

_ALIGNED = 15
_INT32_MAX = 2**31 - 1


class FastKernel:
    """A Triton kernel; `kernel[grid](...)` launches as Triton's own, with constants and options as keywords."""

    def __init__(self, kernel: Any) -> None:
        """Take a kernel as `triton.jit` returns it."""
        self._kernel = kernel
        self._compiled: dict[object, Callable[..., None]] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        """Return the launch with a grid of one to three dimensions."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Grid, *arguments: Any, **constants: Any) -> None:
        key = (*[_kind(each) for each in arguments], *constants.values())
        known = self._compiled.get(key)
        if known is None:
            compiled = self._kernel[grid](*arguments, **constants)
            self._compiled[key] = _launch_of(self._kernel, compiled, len(arguments), constants)
        else:
            known(grid, arguments)


def _kind(value: Any) -> object:
    """Return what Triton specializes an argument on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.get_device(), value.data_ptr() & _ALIGNED == 0
    if isinstance(value, int):
        return value == 1, value & _ALIGNED == 0, value > _INT32_MAX
    return type(value)


def _launch_of(
    kernel: Any, compiled: Any, count: int, constants: dict[str, Any]
) -> Callable[[Grid, Sequence[Any]], None]:
    """Return the direct launch of a compiled kernel, for `count` arguments before the constants."""
    if not hasattr(compiled, "packed_metadata"):  # an interpreted kernel
        return lambda grid, arguments: kernel[grid](*arguments, **constants)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    rest = [constants[name] for name in kernel.arg_names[count:]]
    # As Triton does: torch.cuda.current_stream makes an object.
    stream_of: Any = torch._C._cuda_getCurrentRawStream  # noqa: SLF001

    def launch(grid: Grid, arguments: Sequence[Any]) -> None:
        first, second, third = (*grid, 1, 1)[:3]
        stream = stream_of(arguments[0].get_device())
        run(first, second, third, stream, function, metadata, None, None, None, *arguments, *rest)

    return launch
