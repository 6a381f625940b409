"""Log format of the server, its ranks and the libraries that they use."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LAYOUT = "{asctime} {levelname} [PROCESS] {name}: {message}"
OWN_PACKAGES = ("vsched", "vsched_policies", "vsched_workers")


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a progress display replaces temporarily."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(process: str) -> None:
    """Send all log records and Python warnings of this process to standard error in one format.

    `process` is the name in each line: `engine`, or a rank such as `generate-0 rank 1`. The level is INFO for vsched,
    its workers and policies, and WARNING for libraries. Existing handlers of the root logger, such as a test runner's,
    are kept.
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
