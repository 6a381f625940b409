"""Fault plans: the faults of a simulation as data, and their injection."""
