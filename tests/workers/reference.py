"""Reference outputs: transformers' own `generate` on the same checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class Reference:
    """The whole model, loaded and run by transformers."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        self.model.eval().to(device)
        self.device = device
        self.processor: Any = Qwen2VLImageProcessorPil.from_pretrained(path)

    def generate(
        self, prompt: Sequence[int], images: Sequence[Image.Image], count: int, **options: Any
    ) -> list[int]:
        """Return `count` tokens; `prompt` has its placeholders expanded already."""
        chosen = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count} | options
        with torch.inference_mode():
            out = self.model.generate(**self.inputs(prompt, images), **chosen)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def inputs(self, prompt: Sequence[int], images: Sequence[Image.Image]) -> dict[str, Any]:
        """Return the model's inputs for a prompt and its images."""
        ids = torch.tensor([list(prompt)])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            made = self.processor(list(images), return_tensors="pt")
            inputs["pixel_values"] = made["pixel_values"]
            inputs["image_grid_thw"] = made["image_grid_thw"]
            inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}
