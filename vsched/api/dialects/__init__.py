"""API compatibility layers: other vendors' requests are translated to chat requests, and the output to their events."""
