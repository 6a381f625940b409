"""Simulation reports: metrics, comparison tables, and an HTML report with charts."""
