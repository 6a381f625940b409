"""Tiny random models of every architecture, run by a worker and by transformers' `generate`."""
