"""The plug-in object: the cost of its import and of torch's, and the same preprocessor with and without torch."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.programs import printed_by
from tests.workers.driver import Checkpoints
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.lean_torch import DEFERRED
from vsched_workers.plugin import plugin

CODE = """
import sys
from vsched_workers.plugin import plugin
plugin.checkpoint_sizes()
plugin.inspect(sys.argv[1], dtype="auto", item_tokens_max=64)
heavy = [name for name in ("torch", "transformers", "numba", "tokenizers") if name in sys.modules]
print(heavy)
"""


@pytest.mark.slow
def test_inspect_imports_nothing_heavy(checkpoints: Checkpoints) -> None:
    """Listing sizes and inspecting a checkpoint stay quick: neither torch nor transformers is imported."""
    assert printed_by(CODE, checkpoints("nano25")).strip() == "[]"


PREPROCESSOR_CODE = """
import sys
from vsched_workers.plugin import plugin
if sys.argv[2] == "lean":
    plugin.forgo_models(sys.argv[1])
made = plugin.load_preprocessor(plugin.inspect(sys.argv[1], dtype="auto", item_tokens_max=0))
print(made.settings_digest.hex(), made.image_recipe().settings.hex(), made._tokenizer.backend_tokenizer.to_str())
print(made.render([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]))
print(made.tokenize("Ein Ümlaut, <|im_end|> and 日本"))
print("torch:", sys.modules.get("torch") is not None)
"""


@pytest.mark.slow
def test_plugin_that_forgoes_models_has_the_same_preprocessor(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Also if transformers loads the tokenizer, as for one with names of older files; with any hash seed."""
    folder = shutil.copytree(checkpoints("nano25"), tmp_path / "nano25")
    (folder / "special_tokens_map.json").write_text("{}")
    lean, whole = (
        printed_by(PREPROCESSOR_CODE, folder, way, PYTHONHASHSEED=str(seed)).rpartition("torch:")
        for seed, way in enumerate(("lean", "whole"))
    )
    assert lean[0] == whole[0]
    assert (lean[2].strip(), whole[2].strip()) == ("False", "True")


@pytest.mark.parametrize("stage", ["vision", "language"])
def test_weights_are_loaded_without_leaving_holes(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Otherwise memory that loading frees, as much as the weights, would stay in the heap, lost to the KV cache."""
    module = importlib.import_module(f"vsched_workers.{stage}")
    seen: list[str] = []

    @contextmanager
    def without_holes(_backend: Backend) -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    fill_module = module.fill_module

    def fill(*arguments: object, **named: object) -> None:
        seen.append("weights")
        fill_module(*arguments, **named)

    monkeypatch.setattr(Backend, "without_holes", without_holes)
    monkeypatch.setattr(module, "fill_module", fill)
    info = plugin.inspect(str(checkpoints("nano25")), dtype="auto", item_tokens_max=64)
    load = plugin.load_encoder if stage == "vision" else plugin.load_generator
    load(info, WorkerSettings(), lambda *_: None)
    assert seen[:3] == ["begin", "weights", "end"]


USES = (
    "torch.distributions.Normal(0.0, 1.0)",
    "torch.export.export",
    "import torch.utils.data.dataset",
    "from torch.nn.quantized import Linear",
    "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
)
"""An attribute, a submodule, a name of a package, and the compiler, which expects registrations."""


def test_parts_of_torch_are_loaded_when_they_are_used() -> None:
    """Not by its import, and not by computing; registrations are for operators without data."""
    lines = [
        "import sys",
        "import vsched_workers.lean_torch, torch",
        "assert torch.nn.functional.softmax(torch.zeros(2), 0).sum() == 1",
        f"for name in {sorted(DEFERRED)}:",
        "    assert '_deferred' in vars(sys.modules[name]), name",
        "assert torch._meta_registrations.aten",
        "torch.empty(2, 3, 4, device='meta').logcumsumexp(1)",
        *USES,
    ]
    printed_by("\n".join(lines))


def test_torch_that_is_loaded_stays_as_it_is() -> None:
    printed_by(
        "import torch, vsched_workers.lean_torch\n"
        "assert '_deferred' not in vars(torch._meta_registrations)"
    )
