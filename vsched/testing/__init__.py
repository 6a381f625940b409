"""Test a policy, or the kernel itself, without a model: model ranks, random schedules, and `check_policy`."""

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
