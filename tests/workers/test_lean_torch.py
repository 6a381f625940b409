"""Import of torch without the parts that ranks do not use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vsched_workers.lean_torch import DEFERRED

PARTS = {
    "distributions": "torch.distributions.Normal(0.0, 1.0)",
    "export": "torch.export.export",
    "submodule": "import torch.utils.data.dataset",
    "name of a package": "from torch.nn.quantized import Linear",
    "an operator without data": (
        "import torch._meta_registrations as part; assert part.aten;"
        "torch.empty(2, 3, 4, device='meta').logcumsumexp(1)"
    ),
    "compilation": "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
}


def run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)


def test_import_leaves_parts_out() -> None:
    """No part is loaded, and torch computes."""
    run(
        "import sys\n"
        "import vsched_workers.lean_torch, torch\n"
        "assert torch.nn.functional.softmax(torch.zeros(2), 0).sum() == 1\n"
        f"for name in {sorted(DEFERRED)}:\n"
        "    assert '_deferred' in vars(sys.modules[name]), name\n"
    )


@pytest.mark.parametrize("use", PARTS.values(), ids=PARTS.keys())
def test_part_is_loaded_when_it_is_used(use: str) -> None:
    run(f"import vsched_workers.lean_torch, torch\n{use}")


def test_torch_that_is_loaded_stays_as_it_is() -> None:
    run(
        "import torch, vsched_workers.lean_torch\n"
        "assert '_deferred' not in vars(torch._meta_registrations)"
    )
