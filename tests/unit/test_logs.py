"""One layout for every line of a log."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import datetime

import pytest

from tests.programs import ended
from vsched import logs
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


def run_program(**environment: str) -> list[str]:
    done = ended("-c", PROGRAM, variables=environment)
    assert not done.returncode, done.stderr
    return done.stderr.splitlines()


def test_logs_carry_time_level_process_and_logger() -> None:
    first, of_a_worker, second, third, *_ = run_program()
    assert of_a_worker.endswith("INFO [generate-0 rank 1] vsched_workers.backends: of a worker")
    assert re.fullmatch(rf"{STAMP} INFO \[generate-0 rank 1\] vsched.aio: a {{brace}}", first)
    assert second.endswith("WARNING [generate-0 rank 1] uvicorn.error: of a library")
    assert re.match(rf"{STAMP} WARNING \[generate-0 rank 1\] py.warnings: .*old", third)


def test_logs_leave_a_programs_own_handlers_alone() -> None:
    before = list(logging.root.handlers)
    assert before, "a test runner has handlers"
    configure_logging("engine")
    assert logging.root.handlers == before


def test_logs_are_json_objects_with_time_level_process_and_logger() -> None:
    first, *_, last = map(json.loads, run_program(VSCHED_LOG_FORMAT="json"))
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    origin = {"level": "INFO", "process": "generate-0 rank 1", "logger": "vsched.aio"}
    assert first == {**origin, "message": "a {brace}"}
    assert last["logger"] == "py.warnings"


def test_logs_below_the_level_are_left_out() -> None:
    assert not run_program(VSCHED_LOG_LEVEL="error")
    lines = run_program(VSCHED_LOG_LEVEL="nonsense")
    assert any("vsched.aio" in line for line in lines)


def test_logs_of_an_exception_are_one_json_object() -> None:
    try:
        raise ValueError("wrong\nline")
    except ValueError:
        record = logging.getLogger("vsched").makeRecord(
            "vsched", logging.ERROR, __file__, 1, "stops", (), sys.exc_info()
        )
    line = logs._formatter("engine", "json").format(record)
    assert "\n" not in line
    assert "ValueError: wrong\nline" in json.loads(line)["exception"]


def test_logs_change_level_and_format_of_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (logs.LEVEL_VARIABLE, logs.FORMAT_VARIABLE):
        monkeypatch.setenv(variable, "")
    before = logging.getLogger("vsched").level
    try:
        logs.change_logging(level="warning", form="json")
        assert os.environ[logs.LEVEL_VARIABLE] == "warning"
        assert os.environ[logs.FORMAT_VARIABLE] == "json"
        assert logging.getLogger("vsched").level == logging.WARNING
    finally:
        for package in logs.OWN_PACKAGES:
            logging.getLogger(package).setLevel(before)
