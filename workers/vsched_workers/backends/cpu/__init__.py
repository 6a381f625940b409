"""The CPU backend: fused bfloat16 layers and their compiled kernels."""
