"""Benchmarks of parts of vsched, for its developers: `python -m tests.bench.parts --help`."""
