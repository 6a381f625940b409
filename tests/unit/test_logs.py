"""One layout for every line of a log."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

from vsched.logs import configure_logging

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
PROGRAM = """
import logging, warnings
from vsched.logs import configure_logging
configure_logging("generate-0 rank 1")
logging.getLogger("vsched.aio").info("a %s", "{brace}")
logging.getLogger("torch").info("not for operators")
logging.getLogger("vsched_workers.backends").info("of a worker")
logging.getLogger("uvicorn.error").warning("of a library")
warnings.warn("old")
"""


def test_logs_carry_time_level_process_and_logger() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    first, of_a_worker, second, third, *_ = done.stderr.splitlines()
    assert of_a_worker.endswith("INFO [generate-0 rank 1] vsched_workers.backends: of a worker")
    assert re.fullmatch(rf"{STAMP} INFO \[generate-0 rank 1\] vsched.aio: a {{brace}}", first)
    assert re.fullmatch(
        rf"{STAMP} WARNING \[generate-0 rank 1\] uvicorn.error: of a library", second
    )
    assert re.match(rf"{STAMP} WARNING \[generate-0 rank 1\] py.warnings: .*old", third)


def test_logs_leave_a_programs_own_handlers_alone() -> None:
    before = list(logging.root.handlers)
    assert before, "a test runner has handlers"
    configure_logging("engine")
    assert logging.root.handlers == before
