"""The plug-in object: the cost of its import and of torch's, and the same preprocessor with and without torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.programs import printed_by
from tests.workers.driver import Checkpoints, drawn_image, inspect, load_encoder, load_generator
from tests.workers.edited import copy_of, write
from tests.workers.properties import thorough
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.lean_torch import DEFERRED
from vsched_workers.plugin import plugin

PREPROCESSING = """
import sys
from PIL import Image
from vsched_workers.families.qwen_image import image_processing
from vsched_workers.plugin import plugin
path, folder = sys.argv[1:]
plugin.checkpoint_sizes()
info = plugin.inspect(path, dtype="auto", item_tokens_max=64)
assert not {"torch", "transformers", "numba", "tokenizers"} & set(sys.modules)
made = image_processing(open(folder + "/recipe", "rb").read())
for array in made.process_image(Image.open(folder + "/image.png")).values():
    print(array.tobytes().hex())
front = plugin.load_preprocessor(info)
front.tokenize(front.render([{"role": "user", "content": "Hello"}]))
assert not {"torch", "transformers", "huggingface_hub"} & set(sys.modules)
"""


@pytest.mark.slow
def test_inspection_and_preprocessing_import_nothing_heavy(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Also isolated image processes, which start fast and small, and the first request; the pixels are the same."""
    front: Any = plugin.load_preprocessor(inspect(checkpoints("nano25")))
    (tmp_path / "recipe").write_bytes(front.image_recipe().settings)
    image = drawn_image(3, 320, 200)
    image.save(tmp_path / "image.png")
    wanted = [each.tobytes().hex() for each in front.process_image(image).values()]
    assert printed_by(PREPROCESSING, checkpoints("nano25"), tmp_path).split() == wanted


FORGOING = """
import sys
from vsched_workers.plugin import plugin
plugin.forgo_models(sys.argv[1])
front = plugin.load_preprocessor(plugin.inspect(sys.argv[1], dtype="auto", item_tokens_max=0))
chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
print([front.settings_digest, front.image_recipe().settings])
print(front._tokenizer.backend_tokenizer.to_str())
print(repr(front.render(chat)), front.tokenize("Ein Ümlaut, <|im_end|> and 日本"))
assert sys.modules.get("torch") is None
"""


@pytest.mark.slow
def test_plugin_that_forgoes_models_has_the_same_preprocessor(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Also if transformers loads the tokenizer, as for one with names of older files; with any hash seed."""
    folder = copy_of(checkpoints("nano25"), tmp_path)
    write(folder / "special_tokens_map.json", {})
    front: Any = plugin.load_preprocessor(inspect(folder))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    wanted = [
        str([front.settings_digest, front.image_recipe().settings]),
        front._tokenizer.backend_tokenizer.to_str(),
        f"{front.render(chat)!r} {front.tokenize('Ein Ümlaut, <|im_end|> and 日本')}",
    ]
    assert printed_by(FORGOING, folder, PYTHONHASHSEED="1") == "\n".join([*wanted, ""])


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
    load = load_encoder if stage == "vision" else load_generator
    load(inspect(checkpoints("nano25")))
    assert seen[:3] == ["begin", "weights", "end"]


IMPORT = [
    "import sys",
    "import vsched_workers.lean_torch, torch",
    "assert torch.nn.functional.softmax(torch.zeros(2), 0).sum() == 1",
    f"for name in {sorted(DEFERRED)}:",
    "    assert '_deferred' in vars(sys.modules[name]), name",
    "assert torch._meta_registrations.aten",
    "torch.empty(2, 3, 4, device='meta').logcumsumexp(1)",
]


@pytest.mark.parametrize(
    "uses",
    [
        ["import torch.utils.data.dataset", "from torch.nn.quantized import Linear"],
        *thorough(
            [
                "torch.distributions.Normal(0.0, 1.0)",
                "torch.export.export",
                "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
            ]
        ),
    ],
)
def test_parts_of_torch_are_loaded_when_they_are_used(uses: list[str]) -> None:
    """Not by its import, and not by computing; registrations are for operators without data.

    They are an attribute, a submodule, a name of a package, and the compiler, which expects registrations.
    """
    printed_by("\n".join([*IMPORT, *uses]))


@pytest.mark.thorough
def test_torch_that_is_loaded_stays_as_it_is() -> None:
    printed_by(
        "import torch, vsched_workers.lean_torch\n"
        "assert '_deferred' not in vars(torch._meta_registrations)"
    )
