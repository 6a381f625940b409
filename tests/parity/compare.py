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

WAYS = ("text", "chunked", "preempted", "prefix_cache", "two_ranks")
LENGTHS = (5, 23, 37, 14)
OUTPUTS = 12
CHUNK = 7
FIRST_TOKEN, PAST_TOKEN = 10, 299
WEIGHTS = "model.safetensors"
_EMPTY_FILE = b"\x02" + bytes(7) + b"{}"
"""A file without tensors."""


class Parity(NamedTuple):
    """Whether each kind of run had the tokens of `generate`.

    Attributes:
        path: The path of the computation, as in `vsched check`.
        text: Each prompt in one step, all together.
        chunked: Prompts in chunks of 7, in steps with decodes, blocks shuffled. Every second request has prompt
      log-probabilities, which are the model's.
        preempted: The same, with requests that lose their blocks and are computed again.
        prefix_cache: With the blocks of an earlier request for the beginning of the prompt.
        two_ranks: On both of two ranks, in chunks and with preemptions; None if ranks cannot share the model, or there
      were none.
    """

    path: str
    text: bool = False
    chunked: bool = False
    preempted: bool = False
    prefix_cache: bool = False
    two_ranks: bool | None = None

    @property
    def equal(self) -> bool:
        """Return True if all of them had."""
        ways = (self.text, self.chunked, self.preempted, self.prefix_cache)
        return all(ways) and self.two_ranks is not False


def prompts() -> list[list[int]]:
    """Return the prompts: random text."""
    return [
        torch.randint(
            FIRST_TOKEN, PAST_TOKEN, (length,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        for seed, length in enumerate(LENGTHS)
    ]


class Expected(NamedTuple):
    """Results of transformers' model for a prompt: its output, and log-probabilities of the prompt's own tokens."""

    output: list[int]
    reported: list[float]


def telling(questions: Sequence[Question]) -> list[Question]:
    """Return the questions, every second one with prompt log-probabilities."""
    sampling = msgspec.structs.replace(questions[0].sampling, prompt_logprobs=0)
    return [
        dataclasses.replace(each, sampling=sampling) if index % 2 else each
        for index, each in enumerate(questions)
    ]


def answers_so(answers: Sequence[Running], expected: Sequence[Expected]) -> bool:
    """Return True if outputs and prompt log-probabilities are as expected."""
    pairs = list(zip(answers, expected, strict=True))
    reported = [(one.reported, wanted.reported) for one, wanted in pairs if one.reported]
    assert reported, "no question asks for it"
    close = all(np.allclose(one, wanted, atol=1e-3) for one, wanted in reported)
    return close and all(one.output == wanted.output for one, wanted in pairs)


@torch.inference_mode()
def reported_by(model: Any, **inputs: Any) -> list[float]:
    """Return the log-probability of each token of a prompt but the first, in transformers' model."""
    ids = inputs["input_ids"]
    found = model(**inputs, use_cache=False).logits[0].float().log_softmax(-1)
    reported: list[float] = found[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return reported


def generated(
    path: Path, requested: Sequence[Sequence[int]], *, outputs: int = OUTPUTS
) -> list[list[int]]:
    """Greedy outputs of transformers' `generate`."""
    return [each.output for each in expected_of(path, requested, outputs=outputs)]


@torch.inference_mode()
def expected_of(
    path: Path,
    requested: Sequence[Sequence[int]],
    *,
    sees: bool = False,
    outputs: int = OUTPUTS,
    device: str = "cpu",
) -> list[Expected]:
    """Greedy results of transformers' `generate`; `sees` is set for models that take images, too."""
    made: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = made.from_pretrained(path, dtype=torch.float32).eval().to(device)
    found = []
    for prompt in requested:
        ids = torch.tensor([list(prompt)], device=device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        out = model.generate(
            **inputs,
            max_new_tokens=outputs,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answer = out[0, len(prompt) :].tolist()
        found.append(Expected(answer, reported_by(model, **inputs)))
    return found


def attention_on(device: str) -> str:
    """Return the attention to compare: on a GPU the kernels that pass their trials."""
    return "exact" if device == "cpu" else "auto"


def compare(name: str, *, device: str = "cpu", ranks: Ranks | None = None) -> Parity:
    """Create a model of an architecture and compare; with `ranks` also on two of them, if they can share it.

    Raises:
        CheckpointError: When the architecture is refused.
    """
    with tempfile.TemporaryDirectory(prefix=f"vsched-{name}-") as folder:
        path = Path(folder)
        make_checkpoint(name, path)
        requested = prompts()
        wanted = expected_of(path, requested, sees=name in FAMILY_SIZES, device=device)
        expected = [each.output for each in wanted]
        distinct = {token for answer in expected for token in answer}
        assert len(distinct) > len(LENGTHS) // 2, f"{name}: the answers say too little, {distinct}"
        stage = Stage.load(
            str(path),
            attention=attention_on(device),
            dtype="float32",
            settings=WorkerSettings(threads=1, device=device),
        )
        questions = [Question(prompt, count=OUTPUTS) for prompt in requested]
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
    """Return True if both of two ranks have the expected output; None if they cannot share the model."""
    try:
        info = plugin.inspect(path, dtype="auto", item_tokens_max=0)
        plugin.check_parallel(info, stage="generate", ranks=2)
        found = ranks.run(on_rank.answer_text, path, questions)
    except CheckpointError:
        return None
    return found == [expected, expected]


def with_cached_prefixes(stage: Stage, questions: Sequence[Question]) -> list[Running]:
    """Ask all, then all again over the blocks that the first run left."""
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
    """Return the reason why an architecture cannot be served, or an empty string.

    The weights are missing: the reason is found before they are read.
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
