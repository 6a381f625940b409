"""Adapters on the products of a CPU: the compiled kernel that adds them, and where they go in fused layers."""
