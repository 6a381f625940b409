"""Policies that make several decisions about requests with one state."""

from vsched_policies.requests.tenant_fair import TenantFair

__all__ = ["TenantFair"]
