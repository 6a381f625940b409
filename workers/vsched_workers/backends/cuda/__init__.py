"""The CUDA backend: attention, Triton kernels, captured graphs, copies."""
