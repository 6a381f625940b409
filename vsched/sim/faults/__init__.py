"""Fault plans: what goes wrong in a simulation, as data, and where it is injected."""
