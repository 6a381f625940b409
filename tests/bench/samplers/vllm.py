"""vLLM's sampler on a CPU; `python -m tests.bench.samplers.vllm JOB OUT` in vLLM's environment.

Logits are in bfloat16, as from the model. One thread, as for all samplers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.logits_processor import (  # type: ignore[import-not-found,unused-ignore]
    LogitsProcessors,
)
from vllm.v1.sample.metadata import (  # type: ignore[import-not-found,unused-ignore]
    SamplingMetadata,
)
from vllm.v1.sample.sampler import Sampler  # type: ignore[import-not-found,unused-ignore]

from tests.bench.samplers.job import OUTPUTS, PROMPT, Choose, Fields, Logits, Make, run


def metadata(fields: Fields, history: npt.NDArray[np.int32]) -> Any:
    """Return the sampling metadata of a batch of equal requests."""
    count = len(history)

    def each(name: str, otherwise: float, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), fields.get(name, otherwise), dtype=kind)

    greedy = fields.get("temperature") == 0
    return SamplingMetadata(
        temperature=None if greedy else each("temperature", 1.0),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=each("top_p", 1.0) if "top_p" in fields else None,
        top_k=each("top_k", 0, torch.int32) if "top_k" in fields else None,
        generators={},
        max_num_logprobs=None,
        no_penalties="repetition_penalty" not in fields,
        prompt_token_ids=torch.from_numpy(history[:, :PROMPT]).long(),
        frequency_penalties=each("frequency_penalty", 0.0),
        presence_penalties=each("presence_penalty", 0.0),
        repetition_penalties=each("repetition_penalty", 1.0),
        output_token_ids=history[:, PROMPT : PROMPT + OUTPUTS].tolist(),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def maker(job: dict[str, Any]) -> Make:
    """Return a factory of samplers for logits."""
    del job
    torch.set_num_threads(1)
    sampler = Sampler()

    def make(logits: Logits, fields: Fields, history: npt.NDArray[np.int32]) -> Choose:
        given = torch.from_numpy(logits).to(torch.bfloat16)
        requested = metadata(fields, history)

        def choose() -> npt.NDArray[np.int32]:
            found = sampler(given, requested).sampled_token_ids
            result: npt.NDArray[np.int32] = found.flatten().int().numpy()
            return result

        return choose

    return make


if __name__ == "__main__":
    with torch.inference_mode():
        run(maker)
