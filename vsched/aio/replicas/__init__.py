"""Replicas: the rank processes of a group, how they start, fail, restart and are administered."""
