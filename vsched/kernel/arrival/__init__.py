"""Requests that arrive: the front door."""
