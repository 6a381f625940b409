"""LoRA on the products of a CPU: the compiled kernel, and the positions of adapters in fused layers."""
