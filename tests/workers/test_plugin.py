"""The plug-in object: what it costs to import, and that it keeps its promises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CODE = """
import sys
from vsched_workers.plugin import plugin
plugin.checkpoint_sizes()
plugin.inspect(sys.argv[1], dtype="auto", item_tokens_max=64)
heavy = [name for name in ("torch", "transformers", "numba", "tokenizers") if name in sys.modules]
print(heavy)
"""


@pytest.mark.slow
def test_inspect_imports_nothing_heavy(checkpoints: Callable[[str], Path]) -> None:
    """Listing sizes and inspecting a checkpoint stay quick: neither torch nor transformers is imported."""
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(checkpoints("nano25"))],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.stdout.strip() == "[]"
