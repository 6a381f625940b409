"""The layout of a log line: one for the server, its ranks and the libraries that they use."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LAYOUT = "{asctime} {levelname} [PROCESS] {name}: {message}"
OWN_PACKAGES = ("vsched", "vsched_policies", "vsched_workers")


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is `sys.stderr` at the moment, which a progress display replaces for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(process: str) -> None:
    """Send all log records of this process, and Python's warnings, to standard error in one layout.

    `process` says which of the processes writes: `engine`, or a rank such as `generate-0 rank 1`. Of vsched itself, its
    workers and policies records from INFO on are written, of libraries from WARNING on. Where the root logger has
    handlers already, as under a test runner, they stay.
    """
    if logging.root.handlers:
        return
    own = LAYOUT.replace("PROCESS", process.replace("{", "{{").replace("}", "}}"))
    formatter = logging.Formatter(own, style="{")
    formatter.default_msec_format = "%s.%03d"
    handler = _StandardError()
    handler.setFormatter(formatter)
    logging.root.addHandler(handler)
    for package in OWN_PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    logging.captureWarnings(capture=True)
