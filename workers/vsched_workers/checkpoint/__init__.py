"""Checkpoints: their facts, weights, preprocessing and detokenizing."""
