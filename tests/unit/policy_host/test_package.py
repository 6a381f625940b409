"""`vsched.policy_host` is a package for other programs: it is small, and does not bring the kernel."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_S

IMPORTS = """
import sys
import vsched.policy_host, vsched.plugins
brought = {name.split(".")[1] for name in sys.modules if name.startswith("vsched.")}
print(*sorted(brought))
assert "numpy" not in sys.modules and "asyncio" not in sys.modules
"""


def test_policy_host_does_not_import_the_kernel() -> None:
    found = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert found.stdout.split() == [
        "errors",
        "failures",
        "plugins",
        "policy",
        "policy_host",
        "types",
    ]
