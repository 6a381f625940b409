"""The pure parts of the runner of client checks: checks, their results, the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.clients import catalogue, table
from tests.clients.environments import Place

SCRIPT = """
def check_good():
    print("noise")

async def check_awaited():
    assert 1 == 2, "not | equal"

def other():
    raise ValueError
"""
HERE = Path(catalogue.__file__).parent


def run(tmp_path: Path, script: str) -> list[table.Check]:
    file, results = tmp_path / "script.py", tmp_path / "results"
    file.write_text(script)
    command = [sys.executable, str(HERE / "run_checks.py"), str(file), str(results)]
    done = subprocess.run(command, capture_output=True)
    return table.read(results, "" if done.returncode == 0 else "status 1")


def test_checks_are_run_in_order_and_told_of(tmp_path: Path) -> None:
    good, awaited = run(tmp_path, SCRIPT)
    assert (good.name, good.error) == ("good", "")
    assert awaited.name == "awaited"
    assert awaited.error == "AssertionError: not | equal (check_awaited, line 6)"


def test_a_script_that_breaks_or_checks_nothing_has_failed(tmp_path: Path) -> None:
    assert run(tmp_path, "import nothing_of_this_name") == [table.Check("end", "status 1")]
    assert run(tmp_path, "x = 1") == [table.Check("end", "the script told of no check")]


def test_table_lists_passed_clients_and_reasons_of_failures() -> None:
    checks = [table.Check("chat", ""), table.Check("run_tools", "a |\n b")]
    assert table.write([table.Tried("openai", "3.0", checks)]).splitlines() == [
        "| client | version | passed | failed |",
        "|---|---|---|---|",
        "| openai | 3.0 | chat | run\\_tools |",
        "",
        "| failed | error |",
        "|---|---|",
        "| openai: run\\_tools | a \\| b |",
    ]


def test_every_client_has_a_script_and_a_place_of_its_own() -> None:
    scripts = {client.script for client in catalogue.CLIENTS}
    assert scripts == {path.name for path in (HERE / "scripts").glob("with_*")}
    places = {Place(client, Path()).folder for client in catalogue.CLIENTS}
    assert len(places) == len(catalogue.CLIENTS)
