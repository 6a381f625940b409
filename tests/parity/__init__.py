"""Tiny random models of every architecture, run as a worker runs them and as transformers' `generate` does."""
