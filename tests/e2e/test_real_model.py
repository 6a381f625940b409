"""SmolLM2 behind an engine: a real model with meaningful answers.

Skipped unless `VSCHED_SMOLLM2` names the folder that `vsched make-checkpoint --smollm2` has written.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import transformers

from vsched import Engine, SamplingParams
from vsched.config import load_config

CHECKPOINT = os.environ.get("VSCHED_SMOLLM2", "")
QUESTIONS = ["Name the capital of France.", "Count from 1 to 5.", "What is  12 + 30?"]
TEXTS = ["x =  12\n\n\tdef f(a):", "naïve café 日本 🎉", "<|im_start|>user\nHi<|im_end|>\n"]
OUTPUTS = 24

pytestmark = pytest.mark.skipif(not CHECKPOINT, reason="VSCHED_SMOLLM2 names no checkpoint")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def generated(tokenizer: Any, question: str) -> str:
    """Output of transformers' `generate`, in float32."""
    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype="float32", local_files_only=True
    )
    prompt = tokenizer.apply_chat_template(
        conversation(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**prompt, max_new_tokens=OUTPUTS, do_sample=False)
    return str(tokenizer.decode(found[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


async def choices(dtype: str) -> list[str]:
    sets = [
        f"model.path={CHECKPOINT}",
        f"model.dtype={dtype}",
        "generate.slots=4",
        "generate.chunk_tokens=64",
        "generate.max_batch_tokens=256",
        'generate.memory={use="pinned", tokens=2048}',
        "generate.context_tokens=1024",
    ]
    async with Engine(load_config(None, sets=sets, environ={}).config) as engine:
        said = []
        for index, question in enumerate(QUESTIONS):
            stream = await engine.generate(
                prompt=engine.preprocessor.render(conversation(question)),
                request_id=str(index),
                sampling=SamplingParams(temperature=0.0, max_tokens=OUTPUTS),
            )
            said.append("".join([delta.text async for delta in stream]))
        return said


@pytest.mark.slow
async def test_real_model_answers_as_generate_does(tokenizer: Any) -> None:
    said = await choices("float32")
    assert said == [generated(tokenizer, question) for question in QUESTIONS]
    assert said[0] == "The capital of France is Paris."


@pytest.mark.slow
async def test_real_model_knows_paris_as_it_is_served_by_default() -> None:
    assert "Paris" in (await choices("auto"))[0]


@pytest.mark.slow
def test_real_tokenizer_goes_there_and_back(tokenizer: Any) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("x =  12") == ["x", "Ġ=", "ĠĠ", "1", "2"]
