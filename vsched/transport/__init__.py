"""Transport of decisions and reports between processes, and shared memory."""
