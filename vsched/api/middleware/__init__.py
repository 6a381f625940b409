"""Middleware: request ids and access checks."""
