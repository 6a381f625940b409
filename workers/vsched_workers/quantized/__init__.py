"""Quantized weights: their representation in memory, and quantization."""
