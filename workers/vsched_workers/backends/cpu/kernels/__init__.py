"""Compiled kernels of the CPU backend, in the order in which a layer uses them.

| file | computes |
|---|---|
| `norm.py` | residual sum and RMS norm |
| `gemm.py` | rows times a weight in panels |
| `rope.py` | norms and rotary embedding of heads, and their writing into the KV cache |
| `decode_attention.py` | attention of decode rows over the paged cache, by `…_bf16.py` or `…_float.py` |
| `prefill_attention.py` | attention of chunks and of images |
| `softmax.py` | the online softmax of attention in tiles (`tiled_attention.py`) |
| `activation.py` | SwiGLU |
| `sampling.py` | greedy sampling, and drawing tokens: penalties, draws |
| `kept_tokens.py` | which tokens top-k and top-p keep |

They are made of `compilation.py` (numba, its cache, threads), `bf16.py` (numbers) and `simd.py` (vectors, written for
LLVM).

**Addresses.** An argument `..._at` is an address in memory. What torch has just made arrives so: a view as an array
costs more than most kernels do.

**Argument structures.** What stays the same from load on is a numpy record, which costs 0.2 us per call, whatever it
holds. What a step builds is a `NamedTuple`, which costs 0.15 us per field. Kernels that run several times per layer in
a few microseconds (`gemm.multiply`, `norm.add_norm`) take flat numbers: a record would be 2 to 5 % of such a call.

**Rounding.** bfloat16 values are widened to float32, computed, and rounded to the nearest bfloat16, ties to even,
wherever transformers' modules store one. So results equal theirs but for the order of sums.
"""
