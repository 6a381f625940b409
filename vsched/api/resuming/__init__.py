"""Resumed requests of an earlier engine: computed to the end, and kept for their clients."""
