"""Carrying decisions and reports between processes, and the shared memory beside them."""
