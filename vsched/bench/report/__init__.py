"""Figures, tables and plots shared by all benchmarks."""
