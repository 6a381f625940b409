"""`vsched demo`: everything in one command."""
