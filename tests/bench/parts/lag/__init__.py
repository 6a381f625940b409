"""`python -m tests.bench.parts lag`: event loop latency under the largest legal requests."""
