"""Test a policy, a transport, a worker, or the kernel itself: model ranks, random schedules, contract suites.

A name is loaded when it is first used: the pytest plug-in of this package is imported by every run of pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vsched.testing.check import check_policy
    from vsched.testing.cluster import ModelCluster
    from vsched.testing.contract import ContractBroken
    from vsched.testing.contract_transport import check_transport
    from vsched.testing.contract_worker import check_worker
    from vsched.testing.defaults import default_policies
    from vsched.testing.requests import make_request, random_request, random_sizes
    from vsched.testing.schedule import run_random
    from vsched.testing.strategies import fault_plans, faults

__all__ = [
    "ContractBroken",
    "ModelCluster",
    "check_policy",
    "check_transport",
    "check_worker",
    "default_policies",
    "fault_plans",
    "faults",
    "make_request",
    "random_request",
    "random_sizes",
    "run_random",
]
_MODULES = {
    "ContractBroken": "vsched.testing.contract",
    "ModelCluster": "vsched.testing.cluster",
    "check_policy": "vsched.testing.check",
    "check_transport": "vsched.testing.contract_transport",
    "check_worker": "vsched.testing.contract_worker",
    "default_policies": "vsched.testing.defaults",
    "fault_plans": "vsched.testing.strategies",
    "faults": "vsched.testing.strategies",
    "make_request": "vsched.testing.requests",
    "random_request": "vsched.testing.requests",
    "random_sizes": "vsched.testing.requests",
    "run_random": "vsched.testing.schedule",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
