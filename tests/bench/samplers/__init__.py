"""Sampling cost: vsched compared with the samplers of peers, each in its own environment."""
