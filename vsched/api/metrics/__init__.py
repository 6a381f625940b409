"""Prometheus metrics of requests and of the engine."""

from vsched.api.metrics.requests import CONTENT_TYPE, ApiMetrics, RequestRecord

__all__ = ["CONTENT_TYPE", "ApiMetrics", "RequestRecord"]
