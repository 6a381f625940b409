"""AMX kernels: products and attention in tiles."""
