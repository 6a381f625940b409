"""Test a policy, or the kernel itself, without a model: model ranks, random schedules, and `check_policy`.

A name is loaded when it is first used: the pytest plug-in of this package is imported by every run of pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vsched.testing.check import check_policy
    from vsched.testing.cluster import ModelCluster
    from vsched.testing.defaults import default_policies
    from vsched.testing.requests import make_request, random_request, random_sizes
    from vsched.testing.schedule import run_random

__all__ = [
    "ModelCluster",
    "check_policy",
    "default_policies",
    "make_request",
    "random_request",
    "random_sizes",
    "run_random",
]
_MODULES = {
    "ModelCluster": "vsched.testing.cluster",
    "check_policy": "vsched.testing.check",
    "default_policies": "vsched.testing.defaults",
    "make_request": "vsched.testing.requests",
    "random_request": "vsched.testing.requests",
    "random_sizes": "vsched.testing.requests",
    "run_random": "vsched.testing.schedule",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
