"""Benchmark harness: vsched compared with other servers or an earlier version, alternating in one run."""
