"""Figures, tables and plots that all benchmarks share."""
