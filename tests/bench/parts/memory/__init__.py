"""`python -m tests.bench.parts memory`: memory policies under a hard limit."""
