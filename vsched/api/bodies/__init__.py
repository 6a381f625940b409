"""Request bodies: reading, limits and contents."""
