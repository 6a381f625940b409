"""Test support for policies, workers and the kernel: model ranks, random schedules, contract suites.

Names are imported on first use, because every pytest run imports the pytest plug-in of this
package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vsched.testing.cluster import (
        ModelCluster,
        default_policies,
        make_request,
        random_limits,
        random_request,
        run_random,
    )
    from vsched.testing.contracts.base import ContractBroken
    from vsched.testing.contracts.host import check_host
    from vsched.testing.contracts.worker import check_worker
    from vsched.testing.policy_check import check_policy
    from vsched.testing.policy_run import PolicyRun, RequestAt, run_policy
    from vsched.testing.strategies import fault_plans

__all__ = [
    "ContractBroken",
    "ModelCluster",
    "PolicyRun",
    "RequestAt",
    "check_host",
    "check_policy",
    "check_worker",
    "default_policies",
    "fault_plans",
    "make_request",
    "random_limits",
    "random_request",
    "run_policy",
    "run_random",
]
_NAMES = {
    "cluster": "ModelCluster default_policies make_request random_limits random_request run_random",
    "contracts.base": "ContractBroken",
    "contracts.host": "check_host",
    "contracts.worker": "check_worker",
    "policy_check": "check_policy",
    "policy_run": "PolicyRun RequestAt run_policy",
    "strategies": "fault_plans",
}
"""Names by their modules."""
_MODULES = {
    name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
