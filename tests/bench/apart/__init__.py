"""`python -m tests.bench.apart`: upper bound for the gain of prefill/decode disaggregation."""
