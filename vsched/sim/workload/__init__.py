"""Workloads: requests generated from a seed, or read from recorded traces."""
