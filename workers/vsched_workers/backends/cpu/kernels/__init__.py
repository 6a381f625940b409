"""Compiled kernels of the CPU backend."""
