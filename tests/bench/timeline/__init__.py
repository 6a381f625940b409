"""Requests/s over time, while neighbours come for some seconds and go."""
