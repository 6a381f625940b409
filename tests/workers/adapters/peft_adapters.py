"""LoRA adapters saved by PEFT, and the reference output of PEFT itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch

from tests.parity.compare import expected, generated, inputs_of_text, library_model
from tests.workers.reference import Reference


def make_adapter(base: Path, folder: Path, seed: int, **settings: Any) -> None:
    """Write an adapter of all linear layers, or as configured, that changes the output."""
    _save_random(library_model(base), folder, seed, settings)


def make_whole_adapter(base: Path, folder: Path, seed: int, **settings: Any) -> Any:
    """Write an adapter that changes tower and language model; return PEFT's model."""
    return _save_random(library_model(base, sees=True), folder, seed, settings)


def _save_random(model: Any, folder: Path, seed: int, settings: Mapping[str, Any]) -> Any:
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **settings}
    model = peft.get_peft_model(model, peft.LoraConfig(**chosen))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.normal_(std=0.2)
    model.save_pretrained(str(folder))
    return model.eval()


def expected_tokens(base: Path, adapter: Path | None, prompt: list[int]) -> list[int]:
    """Return the output of `generate` with PEFT's adapter."""
    if adapter is None:
        return generated(base, [prompt])[0]
    model = peft.PeftModel.from_pretrained(library_model(base), str(adapter))
    return expected(model, inputs_of_text(prompt)).output


LANGUAGE_LAYERS = r".*language_model\.layers.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
"""The linear layers of a vision-language model's language model."""


class AdaptedReference(Reference):
    """A whole vision-language model with an adapter applied by PEFT; the constructor creates the adapter."""

    def __init__(
        self, path: Path, adapter: Path, *, seed: int, layers: str = LANGUAGE_LAYERS
    ) -> None:
        super().__init__(path)
        self.model = _save_random(self.model, adapter, seed, {"target_modules": layers})
