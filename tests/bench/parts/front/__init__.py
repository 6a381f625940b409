"""`python -m tests.bench.parts front`: cost of serving HTTP, measured with ranks that compute nothing."""
