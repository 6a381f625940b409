"""`vsched bench kernel`: cost of the scheduler."""
