"""`python -m tests.bench.parts ranks`: latency of a decision from leader to rank."""
