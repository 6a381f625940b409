"""Compiled decode steps: all layers in one call of compiled code, which calls the kernels by address."""
