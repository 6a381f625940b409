"""`python -m tests.clients CHECKPOINT`: the clients that people use, in environments of their own, against vsched."""
