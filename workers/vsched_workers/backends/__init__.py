"""Backends: attention, products, memory and graphs for each kind of device."""
