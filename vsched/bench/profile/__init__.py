"""`vsched bench profile`: time spent on a served load, by component."""
