"""Weights in a few bits: their form in memory, and how they are made."""
