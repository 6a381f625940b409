"""Workloads: requests made from a seed, or read from recorded traces."""
