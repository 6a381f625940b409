"""The small model: configuration, tokenizer, processor settings, and a forward pass for training.

The architecture is Qwen2.5-VL's, including window attention; the modules are transformers' own. `encode` runs them over
images of many sizes at once, with one masked attention call instead of one per window.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import Regex, pre_tokenizers

from demo_training import samples
from demo_training.drawing import COLOURS, SHAPES
from vsched_workers.checkpoint.files import without_bars
from vsched_workers.checkpoint.random_init import (
    learnt_tokenizer,
    processor_settings,
    random_model,
)

VOCABULARY = 512
IMAGE_TOKENS = (4, 48)
PATCH, MERGE = 14, 2
FACTOR = PATCH * MERGE

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Pictures are a few tokens wide: the frequencies of a large model would hardly distinguish columns.
    "rope_parameters": {"rope_type": "default", "rope_theta": 16.0, "mrope_section": [4, 4, 8]},
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
VISION: dict[str, Any] = {
    "depth": 5,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_heads": 4,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [1, 3, 4],
    "window_size": 112,
    "initializer_range": 0.05,
}


@dataclass(frozen=True)
class VisionBatch:
    """Preprocessed images: patches, one frame of the two (a still image repeats it), tokens together.

    Attributes:
        patches: [patches, values]; `positions` are their rows and columns, [patches, 2].
        places: The patches of each image, padded to the largest one: [images, longest]; `there` is False for padding.
        in_image: Which patches of an image attend to each other: [images, 1, longest, longest].
        in_window: Likewise, within windows.
    """

    patches: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    there: torch.Tensor
    in_image: torch.Tensor
    in_window: torch.Tensor


def make_tokenizer() -> Any:
    """Make a byte-level tokenizer that is trained on the questions; each digit is a token."""
    cut = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return learnt_tokenizer(_words(), cut, words=VOCABULARY, longest=4096)


def _words() -> list[str]:
    fields = {"which": ("first", "second"), "shape": SHAPES, "colour": tuple(COLOURS)}
    fields["shapes"] = tuple(samples.PLURALS.values())
    texts = ["user\n", "assistant\n", "system\nYou are a helpful assistant."]
    texts += [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    for name, wordings in vars(samples).items():
        if not name.isupper() or name in {"TASKS", "PLURALS"} or not isinstance(wordings, tuple):
            continue
        for wording in wordings:
            field = next((key for key in fields if f"{{{key}}}" in wording), None)
            if field is None:
                texts.append(wording)
            else:
                texts += [wording.format(**{field: value}) for value in fields[field]]
    return texts


def make_model(tokenizer: Any, seed: int) -> Any:
    """Make the model with random weights, in float32."""
    model = random_model("qwen2_5_vl", TEXT, VISION, tokenizer, seed=seed)
    model.generation_config.do_sample = False
    return model


def write_front_end(directory: Path, tokenizer: Any) -> None:
    """Write tokenizer, chat template and processor settings."""
    tokenizer.save_pretrained(directory)
    least, most = (tokens * FACTOR * FACTOR for tokens in IMAGE_TOKENS)
    content = processor_settings((least, most), is_qwen3=False)
    settings = content["image_processor"]
    for name, part in (("processor_config.json", content), ("preprocessor_config.json", settings)):
        (directory / name).write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")


def write_model(directory: Path, model: Any, weights: dict[str, Any]) -> None:
    """Write configuration and weights, in bfloat16."""
    rounded = copy.deepcopy(model)
    rounded.load_state_dict(weights, strict=False)
    with without_bars():
        rounded.to(torch.bfloat16).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)


def encode(tower: Any, batch: VisionBatch) -> torch.Tensor:
    """Return the embeddings of all images, [tokens, hidden], concatenated."""
    # Both frames of a still image are the same, so their two kernels are summed.
    kernel = tower.patch_embed.proj.weight.sum(dim=2).flatten(1)
    rows = F.linear(batch.patches, kernel)
    cos, sin = (part[:, None] for part in tower.rotary_pos_emb(rows, batch.positions))
    for number, block in enumerate(tower.blocks):
        mask = batch.in_image if number in tower.fullatt_block_indexes else batch.in_window
        rows = rows + _attend(block.attn, _norm(block.norm1, rows), batch, mask, cos, sin)
        rows = rows + block.mlp(_norm(block.norm2, rows))
    merger = tower.merger
    embeddings: torch.Tensor = merger.mlp(_norm(merger.ln_q, rows).view(-1, merger.hidden_size))
    return embeddings


def _norm(norm: Any, rows: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(rows, (rows.shape[-1],), norm.weight, norm.variance_epsilon)


def _attend(
    attention: Any,
    rows: torch.Tensor,
    batch: VisionBatch,
    mask: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    qkv = attention.qkv(rows).view(len(rows), 3, attention.num_heads, -1)
    queries, keys, values = qkv.unbind(1)
    both = torch.stack((queries, keys))
    first, second = both.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    queries, keys = (both * cos + turned * sin).to(values.dtype).unbind(0)
    q, k, v = (part[batch.places].transpose(1, 2) for part in (queries, keys, values))
    seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    out: torch.Tensor = attention.proj(seen.transpose(1, 2)[batch.there].flatten(1))
    return out


def read_text(model: Any, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Run the language model over rows padded on the right; causal attention excludes the padding."""
    hidden: torch.Tensor = model.model.language_model(
        inputs_embeds=embeddings, position_ids=positions, use_cache=False
    ).last_hidden_state
    return hidden
