"""`python -m tests.bench.apart`: what prefill and decode apart could gain at most."""
