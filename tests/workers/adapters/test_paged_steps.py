"""Requests with different adapters share the steps of a generate worker, and answer as with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import OUTPUTS, generated, prompts, tokens_of
from tests.workers.driver import Driver, Question, Stage
from vsched.worker.contract import Batch
from vsched_workers.adapters import AdaptedModule, read_adapter

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

NAMES = (None, "first", "second", "first")
"""The adapter of each prompt."""


def make_adapter(base: Path, folder: Path, seed: int) -> None:
    """Write an adapter of all linear layers, which changes the answers."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.normal_(std=0.2)
    model.save_pretrained(str(folder))


def expected_tokens(base: Path, adapter: Path | None, prompt: list[int]) -> list[int]:
    """Return what `generate` says with PEFT's own adapter."""
    if adapter is None:
        return generated(base, [prompt])[0]
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    model = peft.PeftModel.from_pretrained(model, str(adapter))
    ids = torch.tensor([prompt])
    fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUTS, **fixed
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def adapt(stage: Stage, adapters: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each step of a worker run with the adapters of its rows."""
    worker: Any = stage.generator
    module = AdaptedModule(worker._language.module, prefixes=(prefix,), count_max=2)
    for name in ("first", "second"):
        module.add(name, read_adapter(adapters / name, rank_max=4))
    step = worker.step

    def adapted(batch: Batch) -> Any:
        names = [NAMES[each.number] for each in batch.decode_sequences]
        for chunk in batch.chunks:
            names += [NAMES[chunk.sequence.number]] * (chunk.stop - chunk.start)
        with module.rows(names):
            return step(batch)

    monkeypatch.setattr(worker, "step", adapted)


@pytest.mark.parametrize(("name", "prefix"), [("llama", "model."), ("stablelm", "")])
def test_chunks_decodes_and_preemptions_keep_to_the_adapters_of_their_requests(
    name: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    make_checkpoint(name, base)
    for seed, adapter in enumerate(("first", "second")):
        make_adapter(base, tmp_path / adapter, seed)
    asked = [prompts()[1]] * len(NAMES)
    found = {
        each: expected_tokens(base, tmp_path / each if each else None, asked[0]) for each in NAMES
    }
    assert len({tuple(tokens) for tokens in found.values()}) == 3, "each changes the answer"
    stage = Stage.load(str(base), attention="exact", dtype="float32")
    adapt(stage, tmp_path, prefix, monkeypatch)
    questions = [Question(prompt, count=OUTPUTS) for prompt in asked]
    answers = Driver(stage, chunk=7, seed=1).run(questions, arrivals=2, preempts=5)
    assert tokens_of(answers) == [found[each] for each in NAMES]
