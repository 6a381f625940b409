"""`python -m tests.bench.parts profile`: time spent on a served load, by component."""
