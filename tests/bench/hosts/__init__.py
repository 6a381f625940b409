"""`python -m tests.bench.hosts`: what it costs to encode on one host and to generate on another."""
