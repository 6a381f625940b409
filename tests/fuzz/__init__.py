"""A mutation fuzz of the HTTP API: requests by its grammar, bent and broken, of which none may be answered by a 500."""
