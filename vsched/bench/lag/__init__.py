"""`vsched bench lag`: how long the event loop is held up by the largest legal requests."""
