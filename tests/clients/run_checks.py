"""`python run_checks.py SCRIPT RESULTS`: run every function `check_*` of a script; a line of JSON for each.

The client's own Python runs it, so it needs nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def error_of(check: Callable[[], Any]) -> str:
    """Run a check; return its error in a line, or an empty string."""
    try:
        result = check()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except Exception as error:  # noqa: BLE001 - whatever it is, the check failed
        traceback.print_exc()
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
    return ""


def main() -> None:
    """Run the checks of a script in their order."""
    script, results = sys.argv[1:]
    with Path(results).open("a") as file:
        for name, check in runpy.run_path(script).items():
            if name.startswith("check_"):
                line = {"check": name.removeprefix("check_"), "error": error_of(check)}
                print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
