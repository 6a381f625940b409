"""OpenTelemetry traces of requests: where spans are sent. Nothing of the SDK is imported unless they are."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING

from vsched.config.sections import ServerConfig
from vsched.errors import ConfigError

if TYPE_CHECKING:
    from vsched.api.tracing.spans import Tracing

logger = logging.getLogger(__name__)
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_TRACES_PATH = "/v1/traces"
_MISSING = "the OpenTelemetry SDK is not installed. Remedy: pip install 'vsched[otel]'"


def traces_url(server: ServerConfig) -> str:
    """URL of the collector, from the setting or the SDK's environment variables; empty for no traces.

    Raises:
        ConfigError: If the setting needs the SDK, which is not installed. A variable, which may be meant for other
            programs of the host, is only a reason for a warning.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if server.otlp_endpoint:
        if not _is_installed():
            raise ConfigError(f"server.otlp_endpoint: {_MISSING}, or leave the setting empty")
        return _with_path(server.otlp_endpoint)
    if os.environ.get("OTEL_TRACES_EXPORTER", "").strip() == "none":
        return ""
    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    url = url or _with_path(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""))
    if url and not _is_installed():
        logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT has no effect: %s", _MISSING)
        return ""
    return url


def _with_path(endpoint: str) -> str:
    base = endpoint.rstrip("/").removesuffix(_TRACES_PATH)
    return base + _TRACES_PATH if base else ""


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def open_tracing(url: str) -> Tracing | None:
    """Start sending spans to this URL; None if it is empty.

    Raises:
        ConfigError: If the SDK rejects one of its environment variables.
    """
    if not url:
        return None
    from vsched.api.tracing.spans import Tracing

    try:
        return Tracing(url)
    except ValueError as error:
        raise ConfigError(
            f"the OpenTelemetry SDK cannot start: {error}. Remedy: correct server.otlp_endpoint or the OTEL_ variables"
        ) from error
