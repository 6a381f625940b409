"""`python -m tests.bench.parts video`: stalls next to videos, and the cost of further questions about one."""
