"""Kernels compiled for an H100 that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def compiled(made: str) -> list[Any]:
    """Return what calls of `tests.bench.gpu.kernels` give, in a process of its own, which does not interpret."""
    code = f"import json; from tests.bench.gpu.kernels import *; print(json.dumps({made}))"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert not ran.returncode, ran.stderr
    found: list[Any] = json.loads(ran.stdout)
    return found
