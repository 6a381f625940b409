"""Requests with different adapters share the steps of a generate worker, and answer as with PEFT."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.parity.architectures import make_checkpoint
from tests.parity.compare import OUTPUTS, prompts, tokens_of
from tests.workers.adapters.peft_adapters import expected_tokens, make_adapter
from tests.workers.driver import Driver, Question, Stage
from vsched.errors import CheckpointError, ConfigError
from vsched.worker.capabilities import ServesAdapters
from vsched.worker.contract import WorkerSettings
from vsched_workers.adapters.files import WEIGHTS_FILE
from vsched_workers.adapters.serving import served_adapters

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SETTINGS = WorkerSettings(threads=1, adapters=2, adapter_rank_max=4)
ASKED = (0, 1, 2, 1)
"""The adapter of each prompt; 0 for the model alone."""


def adapter_worker(stage: Stage) -> ServesAdapters:
    assert isinstance(stage.generator, ServesAdapters)
    return stage.generator


def make_all(name: str, folder: Path) -> None:
    """Write a checkpoint, `base`, and adapters to it by number."""
    (folder / "base").mkdir()
    make_checkpoint(name, folder / "base")
    for number in (1, 2):
        make_adapter(folder / "base", folder / str(number), number)


@pytest.mark.parametrize("name", ["llama", "stablelm"])
def test_chunks_decodes_and_preemptions_keep_to_the_adapters_of_their_requests(
    name: str, tmp_path: Path
) -> None:
    make_all(name, tmp_path)
    prompt = prompts()[1]
    found = {
        each: expected_tokens(tmp_path / "base", tmp_path / str(each) if each else None, prompt)
        for each in ASKED
    }
    assert len({tuple(tokens) for tokens in found.values()}) == 3, "each changes the answer"
    stage = Stage.load(
        str(tmp_path / "base"), attention="exact", dtype="float32", settings=SETTINGS
    )
    worker = adapter_worker(stage)
    for number in (1, 2):
        worker.add_adapter(number, str(tmp_path / str(number)))

    def answers(asked: tuple[int, ...]) -> list[list[int]]:
        questions = [Question(prompt, count=OUTPUTS, adapter=each) for each in asked]
        return tokens_of(Driver(stage, chunk=7, seed=1).run(questions, arrivals=2, preempts=5))

    assert answers(ASKED) == [found[each] for each in ASKED]
    # The place of one that is removed serves the next; others and the model alone stay what they are.
    worker.remove_adapter(1)
    worker.add_adapter(3, str(tmp_path / "2"))
    assert answers((3, 0, 2)) == [found[2], found[0], found[2]]


def test_memory_for_adapters_is_taken_once_and_is_enough_for_the_highest_rank(
    tmp_path: Path,
) -> None:
    make_all("llama", tmp_path)
    stage = Stage.load(
        str(tmp_path / "base"), attention="exact", dtype="float32", settings=SETTINGS
    )
    worker = adapter_worker(stage)
    taken = worker.adapter_bytes
    assert taken > 0
    prompt = [Question(prompts()[1], count=2, adapter=1)]
    worker.add_trial_adapter(1)
    alone = [Question(prompts()[1], count=2)]
    trial = tokens_of(Driver(stage, chunk=7).run(prompt))
    assert trial == tokens_of(Driver(stage, chunk=7).run(alone)), "it is of zeros"
    worker.remove_adapter(1)
    for number in (2, 3):
        worker.add_adapter(number, str(tmp_path / "1"))
    assert worker.adapter_bytes == taken


def test_an_adapter_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    make_all("llama", tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "1", damaged)
    tensors = load_file(damaged / WEIGHTS_FILE)
    last = max(name for name in tensors if "lora_A" in name)
    tensors[last] = tensors[last][:, 1:].contiguous()
    save_file(tensors, damaged / WEIGHTS_FILE)
    stage = Stage.load(
        str(tmp_path / "base"), attention="exact", dtype="float32", settings=SETTINGS
    )
    worker = adapter_worker(stage)
    for _ in range(3):
        with pytest.raises(CheckpointError, match=r"inputs and outputs.*Remedy"):
            worker.add_adapter(1, str(damaged))
    worker.remove_adapter(1)
    for number in (1, 2):
        worker.add_adapter(number, str(tmp_path / str(number)))


@pytest.mark.parametrize(("ranks", "takes"), [(1, False), (2, True)])
def test_a_path_without_adapters_says_so_at_start(ranks: int, takes: bool) -> None:
    settings = dataclasses.replace(SETTINGS, ranks=ranks)
    with pytest.raises(ConfigError, match=r"adapters\.count_max.*Remedy"):
        served_adapters(
            nn.Linear(2, 2),
            settings,
            torch.bfloat16,
            lambda shape, dtype: torch.zeros(shape, dtype=dtype),
            takes=takes,
            prefixes=("",),
            others=(),
        )
