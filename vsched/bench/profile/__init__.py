"""`vsched bench profile`: where the time of a served load goes."""
