"""Sampling cost by sampling parameters."""
