"""Backends: matrix products, attention, memory, captured steps and copies for each kind of device."""
