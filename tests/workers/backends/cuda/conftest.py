"""Skips tests of kernels that this Triton's interpreter cannot run."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Generator

import pytest

LOOPS = "only 0-dimensional arrays can be converted to Python scalars"
"""The interpreter's error about a loop whose bound is a tensor, up to Triton 3.6."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test whose kernel has such a loop; on a device the error is a failure."""
    try:
        return (yield)
    except Exception as error:
        if os.environ.get("TRITON_INTERPRET") and LOOPS in repr(error) and _is_old():
            pytest.skip("this Triton's interpreter cannot run a loop whose bound is a tensor")
        raise


def _is_old() -> bool:
    return tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) <= (3, 6)
