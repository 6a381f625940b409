"""`python -m tests.bench.hosts`: cost of encoding on one host and generating on another."""
