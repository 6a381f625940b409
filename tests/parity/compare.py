"""One architecture, run three ways by a worker over paged blocks, and compared with `generate`, token by token."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.parity.architectures import FAMILY_SIZES, make_checkpoint
from tests.workers.driver import Driver, Question, Running, Stage, inspect, load_generator, outputs
from tests.workers.parallel import ranks as on_rank
from tests.workers.parallel.ranks import Ranks
from vsched.errors import CheckpointError
from vsched_workers.checkpoint.description import describe_checkpoint
from vsched_workers.plugin import plugin

LENGTHS = (5, 23, 37, 14)
OUTPUTS = 12
CHUNK = 7
WHOLE = 512
"""A chunk that holds any prompt."""
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
    def unequal(self) -> list[str]:
        """The kinds of runs that had others."""
        return [way for way in self._fields if getattr(self, way) is False]


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
    """Return True if outputs and prompt log-probabilities, which some questions ask for, are as expected."""
    pairs = list(zip(answers, expected, strict=True))
    reported = [(one.reported, wanted.reported) for one, wanted in pairs if one.reported]
    assert reported, "no question asks for it"
    close = all(np.allclose(one, wanted, atol=1e-3) for one, wanted in reported)
    return close and all(one.output == wanted.output for one, wanted in pairs)


def library_model(path: Path | str, *, sees: bool = False) -> Any:
    """Return transformers' own model in float32; `sees` is set for models that take images, too."""
    made: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return made.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def expected(model: Any, inputs: Mapping[str, Any], outputs: int = OUTPUTS) -> Expected:
    """Greedy results of transformers' `generate` for the inputs of one prompt, on the model's device."""
    inputs = {key: tensor.to(model.device) for key, tensor in inputs.items()}
    ids = inputs["input_ids"]
    fixed = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(**inputs, **fixed, max_new_tokens=outputs)
    found = model(**inputs, use_cache=False).logits[0].float().log_softmax(-1)
    reported = found[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return Expected(out[0, ids.shape[1] :].tolist(), reported)


def inputs_of_text(prompt: Sequence[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([list(prompt)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generated(
    path: Path, requested: Sequence[Sequence[int]], *, outputs: int = OUTPUTS
) -> list[list[int]]:
    """Greedy outputs of transformers' `generate`."""
    model = library_model(path)
    return [expected(model, inputs_of_text(prompt), outputs).output for prompt in requested]


def attention_on(device: str) -> str:
    """Return the attention to compare: on a GPU the kernels that pass their trials."""
    return "exact" if device == "cpu" else "auto"


def load_on(device: str, path: str, attention: str = "") -> Stage:
    return Stage.load(path, attention=attention or attention_on(device), device=device)


def compare(
    name: str, *, device: str = "cpu", ranks: Ranks | None = None, attention: str = ""
) -> Parity:
    """Create a model of an architecture and compare; with `ranks` also on two of them, if they can share it.

    Raises:
        CheckpointError: When the architecture is refused.
    """
    with tempfile.TemporaryDirectory(prefix=f"vsched-{name}-") as folder:
        make_checkpoint(name, Path(folder))
        model = library_model(folder, sees=name in FAMILY_SIZES).to(device)
        wanted = [expected(model, inputs_of_text(prompt)) for prompt in prompts()]
        questions = [Question(prompt, count=OUTPUTS) for prompt in prompts()]
        path, stage = describe_checkpoint(folder).path, load_on(device, folder, attention)
        found = compared(path, stage, questions, wanted, preempts=5)
        if ranks is None:
            return found
        tokens = [each.output for each in wanted]
        return found._replace(two_ranks=on_two_ranks(ranks, folder, questions, tokens))


def compared(
    path: str,
    stage: Stage,
    questions: Sequence[Question],
    wanted: Sequence[Expected],
    *,
    preempts: int,
) -> Parity:
    """Compare the answers to questions in all ways of running them on one rank."""
    tokens = [each.output for each in wanted]
    distinct = {token for answer in tokens for token in answer}
    assert len(distinct) > len(questions) // 2, f"the outputs vary too little, {distinct}"
    whole = Driver(stage, chunk=WHOLE).run(questions)
    chunked = Driver(stage, chunk=CHUNK).run(telling(questions), arrivals=2)
    again = Driver(stage, chunk=CHUNK, seed=1).run(questions, arrivals=2, preempts=preempts)
    return Parity(
        path=path,
        text=outputs(whole) == tokens,
        chunked=answers_so(chunked, wanted),
        preempted=outputs(again) == tokens,
        prefix_cache=outputs(with_cached_prefixes(stage, questions)) == tokens,
    )


def on_two_ranks(
    ranks: Ranks, path: str, questions: Sequence[Question], expected: list[list[int]]
) -> bool | None:
    """Return True if both of two ranks have the expected output; None if they cannot share the model."""
    try:
        info = inspect(path)
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
            load_generator(info)
        except CheckpointError as error:
            found = re.search(r"model_type '[\w-]+' has (.*), and cannot be served", str(error))
            return found[1] if found else ""
    return ""
