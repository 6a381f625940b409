"""Optional parts of the CUDA backend, and the environment variable that turns them off.

A part that fails its trial is left out with a warning. The variable is for the rest: with one part off at a time, the
part that computes wrong results is found. `generate.attention = "exact"` turns off the attention kernels.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from vsched.errors import ConfigError

VARIABLE = "VSCHED_CUDA_OFF"
PARTS = ("graphs", "layers", "tower", "triton")
"""Captured decode steps, fused layers of language models and of vision towers, and whatever needs Triton."""


def parts_off() -> frozenset[str]:
    """Return the parts that are turned off, separated by commas in the variable.

    Raises:
        ConfigError: When there is no such part.
    """
    names = os.environ.get(VARIABLE, "")
    found = frozenset(name.strip() for name in names.split(",") if name.strip())
    unknown = sorted(found - set(PARTS))
    if unknown:
        raise ConfigError(
            f"{VARIABLE}: unknown part {unknown[0]!r}. Known: {', '.join(PARTS)}, separated by commas. "
            "Remedy: correct it, or unset it."
        )
    return found


def has_triton() -> bool:
    """Return whether Triton is installed, and not turned off."""
    return "triton" not in parts_off() and find_spec("triton") is not None
