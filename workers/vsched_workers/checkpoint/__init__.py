"""Checkpoints: their facts, weights, preprocessing and detokenization."""
