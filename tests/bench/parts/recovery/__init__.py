"""`python -m tests.bench.parts recovery`: cost of a killed generate rank."""
