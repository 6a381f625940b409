"""`vsched demo`: the whole path in one command."""
