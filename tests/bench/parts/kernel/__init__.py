"""`python -m tests.bench.parts kernel`: cost of the scheduler."""
