"""Log format of the server, its ranks and the libraries that they use."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, TextIO

LAYOUT = "{asctime} {levelname} [PROCESS] {name}: {message}"
OWN_PACKAGES = ("vsched", "vsched_policies", "vsched_workers")
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
LEVEL_VARIABLE = "VSCHED_LOG_LEVEL"
"""Environment variable with the level of vsched's own packages; ranks and API processes inherit it."""
FORMAT_VARIABLE = "VSCHED_LOG_FORMAT"
FIELDS = "fields"
"""Attribute of a log record with further fields of its JSON object, set by `extra`."""


REQUEST_FIELDS: ContextVar[Mapping[str, str]] = ContextVar(
    "request_fields", default=MappingProxyType({})
)
"""Ids of the request that the current task serves, for the JSON objects of all its log lines."""


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a progress display replaces temporarily."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= {**REQUEST_FIELDS.get(), **getattr(record, FIELDS, {})}
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(process: str) -> None:
    """Send all log records and Python warnings of this process to standard error in one format.

    `process` is the name in each line: `engine`, or a rank such as `generate-0 rank 1`. The level of vsched, its
    workers and policies is `VSCHED_LOG_LEVEL`, by default INFO, and that of libraries WARNING or above. The format is
    `VSCHED_LOG_FORMAT`. Existing handlers of the root logger, such as a test runner's, are kept.
    """
    if logging.root.handlers:
        return
    handler = _StandardError()
    handler.set_name(process)
    logging.root.addHandler(handler)
    _apply_environment()
    logging.captureWarnings(capture=True)


def change_logging(*, level: str = "", form: str = "") -> None:
    """Set level and format of this process, and of processes that it starts from now on; empty to keep them."""
    if level:
        os.environ[LEVEL_VARIABLE] = level
    if form:
        os.environ[FORMAT_VARIABLE] = form
    _apply_environment()


def _apply_environment() -> None:
    """Set levels, and formatters of the handlers that `configure_logging` added."""
    level = _chosen(LEVEL_VARIABLE, LEVELS, "info").upper()
    form = _chosen(FORMAT_VARIABLE, FORMATS, "text")
    for handler in logging.root.handlers:
        if isinstance(handler, _StandardError):
            handler.setFormatter(_formatter(handler.get_name() or "", form))
            logging.root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(level)


def _chosen(variable: str, values: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, "").lower()
    return value if value in values else default


def _formatter(process: str, form: str) -> logging.Formatter:
    if form == "json":
        return _JsonFormatter(process)
    own = LAYOUT.replace("PROCESS", process.replace("{", "{{").replace("}", "}}"))
    formatter = logging.Formatter(own, style="{")
    formatter.default_msec_format = "%s.%03d"
    return formatter
