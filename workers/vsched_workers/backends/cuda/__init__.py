"""The CUDA backend: attention, Triton kernels, captured graphs, copies.

Left out, with the reasons:

- Embeddings pass through pinned host memory, also with `placement = "together"`: 0.4 to 0.7 ms each way for a 2K image
  at 50 GB/s, next to 39 ms or more of encoding. On the device they would take memory from the KV cache.
- Ranks that share a model capture no graphs: they abort each other's collectives when one fails, and an aborted
  captured collective has not been tried on two GPUs.
- flashinfer: its sampler is not defined by seed and position to the bit, gathering a context of 8,192 tokens for a
  chunk of 2,048 takes 6 of 600 us a layer, and its wheels fit one version of torch and CUDA each.
"""
