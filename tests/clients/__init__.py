"""`python -m tests.clients CHECKPOINT`: common clients, in environments of their own, against vsched."""
