"""Requests/s over time, with neighbours for some seconds."""
