"""llama.cpp's sampler chain; `python -m tests.bench.samplers.llamacpp JOB OUT`, with its library named in the job.

As in its server, each row has a chain and is first converted to an array of candidates; the chain
contains only the requested samplers. Penalties see as many tokens as those of the other samplers,
not the last 64 alone.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.samplers.job import OUTPUTS, PROMPT, Choose, Fields, Logits, Make, run

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Candidates(ctypes.Structure):
    """`llama_token_data_array`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class ChainParams(ctypes.Structure):
    """`llama_sampler_chain_params`."""

    _fields_ = (("no_perf", ctypes.c_bool),)


def load(path: str) -> ctypes.CDLL:
    """Return the library with typed functions."""
    library = ctypes.CDLL(path)
    float_, size, handle = ctypes.c_float, ctypes.c_size_t, ctypes.c_void_p
    arguments: dict[str, list[Any]] = {
        "init_greedy": [],
        "init_dist": [ctypes.c_uint32],
        "init_top_k": [ctypes.c_int32],
        "init_top_p": [float_, size],
        "init_temp": [float_],
        "init_penalties": [ctypes.c_int32, ctypes.c_int32, float_, float_, float_],
        "chain_init": [ChainParams],
    }
    actions: dict[str, list[Any]] = {
        "chain_add": [handle, handle],
        "accept": [handle, ctypes.c_int32],
        "apply": [handle, ctypes.POINTER(Candidates)],
    }
    for functions, result in ((arguments, handle), (actions, None)):
        for name, types in functions.items():
            function = getattr(library, f"llama_sampler_{name}")
            function.argtypes, function.restype = types, result
    return library


def chain(
    library: Any, vocabulary: int, fields: Fields, history: npt.NDArray[np.int32], seed: int
) -> int:
    """Return a chain in the server's order, fed with the history of a row."""
    made: int = library.llama_sampler_chain_init(ChainParams(no_perf=True))

    def add(name: str, *arguments: float) -> None:
        step = getattr(library, f"llama_sampler_init_{name}")(*arguments)
        library.llama_sampler_chain_add(made, step)

    if "repetition_penalty" in fields:
        strengths = [fields[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")]
        add("penalties", vocabulary, PROMPT + OUTPUTS, *strengths)
    if fields.get("temperature") == 0:
        add("greedy")
    else:
        if "top_k" in fields:
            add("top_k", int(fields["top_k"]))
        if "top_p" in fields:
            add("top_p", fields["top_p"], 1)
        add("temp", fields.get("temperature", 1.0))
        add("dist", seed)
    for token in history.tolist():
        library.llama_sampler_accept(made, token)
    return made


def maker(job: dict[str, Any]) -> Make:
    """Return a factory of samplers for logits."""
    library = load(job["library"])

    def make(logits: Logits, fields: Fields, history: npt.NDArray[np.int32]) -> Choose:
        count, vocabulary = logits.shape
        chains = [chain(library, vocabulary, fields, history[row], row) for row in range(count)]
        candidates = np.zeros(vocabulary, CANDIDATE)
        ids = np.arange(vocabulary, dtype=np.int32)

        def choose() -> npt.NDArray[np.int32]:
            found = np.empty(count, np.int32)
            for row in range(count):
                candidates["id"] = ids
                candidates["logit"] = logits[row]
                array = Candidates(candidates.ctypes.data, vocabulary, -1, False)
                library.llama_sampler_apply(chains[row], ctypes.byref(array))
                if array.selected < 0:
                    raise ValueError("the chain chose no token")
                if array.data != candidates.ctypes.data:
                    raise ValueError("the chain moved its candidates")
                found[row] = candidates["id"][array.selected]
            return found

        return choose

    return make


if __name__ == "__main__":
    run(maker)
