"""Compiled kernels of the CPU backend, in the order of their use in a layer.

| file | computes |
|---|---|
| `norm.py` | residual sum and RMS norm |
| `gemm.py` | activations times a weight in panels |
| `low_rank.py` | the products of LoRA adapters |
| `rope.py` | norms and rotary embedding of heads, and writes into the KV cache |
| `decode_attention.py` | attention of decode rows over the paged cache |
| `prefill_attention.py` | attention of prefill chunks and of images |
| `activation.py` | SwiGLU |
| `sampling.py` | greedy sampling, penalties and random draws |

Shared code: `compilation.py` (numba and its cache), `thread_pool.py` (threads), `bf16.py` (number formats) and
`simd.py` (vector instructions, emitted as LLVM IR).

**Addresses.** An argument `..._at` is a memory address. New torch tensors are passed this way: a view as an array
costs more than most kernels.

**Argument structures.** Arguments that stay the same after loading are a numpy record, which costs 0.2 us per call,
whatever its size. Arguments that a step builds are a `NamedTuple`, which costs 0.15 us per field. Kernels that run
several times per layer in a few microseconds (`gemm.multiply`, `norm.add_norm`) take plain numbers: a record would be
2 to 5 % of such a call.

**Rounding.** bfloat16 values are widened to float32, computed, and rounded to the nearest bfloat16, ties to even,
wherever transformers' modules store one. So results equal those of transformers except for the order of sums.
"""
