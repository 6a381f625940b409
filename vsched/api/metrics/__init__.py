"""Prometheus metrics: what requests experienced, and what the engine counts."""

from vsched.api.metrics.requests import CONTENT_TYPE, ApiMetrics, RequestRecord

__all__ = ["CONTENT_TYPE", "ApiMetrics", "RequestRecord"]
