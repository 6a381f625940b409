"""A fuzz of the HTTP API: damaged requests, and hostile schemas and grammars; none leads to a 500."""
