"""`vsched bench kernel`: the cost of the scheduler itself."""
