"""Other vendors' APIs over the chat that is there: bodies become its requests, and its answers their events."""
