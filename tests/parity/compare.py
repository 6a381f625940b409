"""One architecture, run three ways by a worker over paged blocks, and compared with `generate`, token by token."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.parity.architectures import FAMILY_SIZES, make_checkpoint
from tests.workers.driver import Driver, Question, Running, Stage
from tests.workers.parallel import ranks as on_rank
from tests.workers.parallel.ranks import Ranks
from vsched.errors import CheckpointError
from vsched.worker.contract import WorkerSettings
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.plugin import plugin

LENGTHS = (5, 23, 37, 14)
OUTPUTS = 12
CHUNK = 7
FIRST_TOKEN, PAST_TOKEN = 10, 299
WEIGHTS = "model.safetensors"
_EMPTY_FILE = b"\x02" + bytes(7) + b"{}"
"""A file of no tensors."""


class Parity(NamedTuple):
    """Whether each way of running gave the tokens of `generate`.

    Attributes:
        path: How `vsched check` says that it is computed.
        text: Each prompt in one step, all together.
        chunked: Prompts in chunks of 7, decodes beside them, blocks shuffled. Every second one tells the
            log-probabilities of its tokens, and they are the model's.
        preempted: The same, with requests that lose their blocks and are computed again.
        prefix_cache: With the blocks of an earlier request for the beginning of the prompt.
        two_ranks: On both of two ranks, in chunks and with preemptions; None where ranks cannot share the model, or
            were not asked.
    """

    path: str
    text: bool = False
    chunked: bool = False
    preempted: bool = False
    prefix_cache: bool = False
    two_ranks: bool | None = None

    @property
    def equal(self) -> bool:
        """Whether all of them did."""
        ways = (self.text, self.chunked, self.preempted, self.prefix_cache)
        return all(ways) and self.two_ranks is not False


def prompts() -> list[list[int]]:
    """Return the prompts: text of no meaning."""
    return [
        torch.randint(
            FIRST_TOKEN, PAST_TOKEN, (length,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        for seed, length in enumerate(LENGTHS)
    ]


class Expected(NamedTuple):
    """What transformers' model says to a prompt: its answer, and the log-probabilities of the prompt's own tokens."""

    output: list[int]
    told: list[float]


def telling(questions: Sequence[Question]) -> list[Question]:
    """Return questions of which every second one tells the log-probabilities of its prompt."""
    sampling = msgspec.structs.replace(questions[0].sampling, prompt_logprobs=0)
    return [
        dataclasses.replace(each, sampling=sampling) if index % 2 else each
        for index, each in enumerate(questions)
    ]


def answers_so(answers: Sequence[Running], expected: Sequence[Expected]) -> bool:
    """Return whether answers are as they must be, and what is told of prompts is."""
    pairs = list(zip(answers, expected, strict=True))
    told = [(one.told, wanted.told) for one, wanted in pairs if one.told]
    assert told, "no question asks for it"
    close = all(np.allclose(one, wanted, atol=1e-3) for one, wanted in told)
    return close and all(one.output == wanted.output for one, wanted in pairs)


@torch.inference_mode()
def told_by(model: Any, **inputs: Any) -> list[float]:
    """Return the log-probability of each token of a prompt but the first, in transformers' model."""
    ids = inputs["input_ids"]
    found = model(**inputs, use_cache=False).logits[0].float().log_softmax(-1)
    told: list[float] = found[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return told


def generated(
    path: Path, asked: Sequence[Sequence[int]], *, outputs: int = OUTPUTS
) -> list[list[int]]:
    """Return what transformers' `generate` says, greedily."""
    return [each.output for each in expected_of(path, asked, outputs=outputs)]


@torch.inference_mode()
def expected_of(
    path: Path, asked: Sequence[Sequence[int]], *, sees: bool = False, outputs: int = OUTPUTS
) -> list[Expected]:
    """Return what transformers' `generate` says, greedily; `sees` is whether the model takes images, too."""
    made: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = made.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt in asked:
        ids = torch.tensor([list(prompt)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        out = model.generate(
            **inputs,
            max_new_tokens=outputs,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answer = out[0, len(prompt) :].tolist()
        found.append(Expected(answer, told_by(model, **inputs)))
    return found


def compare(name: str, *, attention: str = "exact", ranks: Ranks | None = None) -> Parity:
    """Make a model of an architecture and compare; with `ranks` as two of them, too, where they can share it.

    Raises:
        CheckpointError: When the architecture is refused.
    """
    with tempfile.TemporaryDirectory(prefix=f"vsched-{name}-") as folder:
        path = Path(folder)
        make_checkpoint(name, path)
        asked = prompts()
        wanted = expected_of(path, asked, sees=name in FAMILY_SIZES)
        expected = [each.output for each in wanted]
        distinct = {token for answer in expected for token in answer}
        assert len(distinct) > len(LENGTHS) // 2, f"{name}: the answers say too little, {distinct}"
        stage = Stage.load(str(path), attention=attention, dtype="float32")
        questions = [Question(prompt, count=OUTPUTS) for prompt in asked]
        return Parity(
            path=describe_checkpoint(folder).path,
            text=tokens_of(Driver(stage, chunk=max(LENGTHS)).run(questions)) == expected,
            chunked=answers_so(
                Driver(stage, chunk=CHUNK).run(telling(questions), arrivals=2), wanted
            ),
            preempted=tokens_of(
                Driver(stage, chunk=CHUNK, seed=1).run(questions, arrivals=2, preempts=5)
            )
            == expected,
            prefix_cache=tokens_of(with_cached_prefixes(stage, questions)) == expected,
            two_ranks=None if ranks is None else on_two_ranks(ranks, folder, questions, expected),
        )


def on_two_ranks(
    ranks: Ranks, path: str, questions: Sequence[Question], expected: list[list[int]]
) -> bool | None:
    """Return whether both of two ranks answer so; None where they cannot share the model."""
    try:
        info = plugin.inspect(path, dtype="auto", item_tokens_max=0)
        plugin.check_parallel(info, stage="generate", ranks=2)
        found = ranks.run(on_rank.answer_text, path, questions)
    except CheckpointError:
        return None
    return found == [expected, expected]


def with_cached_prefixes(stage: Stage, questions: Sequence[Question]) -> list[Running]:
    """Ask all, then all again over the blocks that the first answers left."""
    driver = Driver(stage, chunk=CHUNK, seed=2)
    first = driver.run(questions)
    again = [driver.start(index, question) for index, question in enumerate(questions)]
    adopted = sum(driver.adopt(new, old) for new, old in zip(again, first, strict=True))
    assert adopted == 0 if stage.info.prompt_atomic else adopted > 40
    active = again
    while active:
        driver.step(active)
        active = [each for each in active if len(each.sequence.outputs) < each.budget]
    return again


def tokens_of(answers: Sequence[Running]) -> list[list[int]]:
    return [answer.output for answer in answers]


def refusal_of(name: str) -> str:
    """Return what keeps an architecture from being served; empty where nothing does.

    The weights are not there: it is told before they are read.
    """
    with tempfile.TemporaryDirectory(prefix=f"vsched-{name}-") as folder:
        path = Path(folder)
        make_checkpoint(name, path)
        (path / WEIGHTS).write_bytes(_EMPTY_FILE)
        try:
            info = plugin.inspect(folder, dtype="auto", item_tokens_max=0)
            plugin.load_generator(info, WorkerSettings(), lambda _label, _fraction: None)
        except CheckpointError as error:
            found = re.search(r"model_type '[\w-]+' has (.*), and cannot be served", str(error))
            return found[1] if found else ""
    return ""
