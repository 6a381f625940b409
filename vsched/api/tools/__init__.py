"""Tool calls of chat requests."""
