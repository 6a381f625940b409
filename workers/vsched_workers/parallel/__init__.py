"""Tensor parallelism: slicing, collectives, experts."""
