"""`python -m tests.bench.parts accuracy`: output accuracy under different settings."""
