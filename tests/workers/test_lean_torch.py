"""Import of torch without the parts that ranks do not use."""

from __future__ import annotations

import subprocess
import sys

from vsched_workers.lean_torch import DEFERRED

USES = (
    "torch.distributions.Normal(0.0, 1.0)",
    "torch.export.export",
    "import torch.utils.data.dataset",
    "from torch.nn.quantized import Linear",
    "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
)
"""An attribute, a submodule, a name of a package, and the compiler, which expects registrations."""


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


def test_parts_are_loaded_when_they_are_used() -> None:
    run("\n".join(["import vsched_workers.lean_torch, torch", *USES]))


def test_registrations_are_loaded_for_operators_without_data() -> None:
    run(
        "import vsched_workers.lean_torch, torch\n"
        "assert torch._meta_registrations.aten\n"
        "torch.empty(2, 3, 4, device='meta').logcumsumexp(1)"
    )


def test_torch_that_is_loaded_stays_as_it_is() -> None:
    run(
        "import torch, vsched_workers.lean_torch\n"
        "assert '_deferred' not in vars(torch._meta_registrations)"
    )
