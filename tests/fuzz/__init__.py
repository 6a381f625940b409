"""A fuzz of the HTTP API: bent and broken requests, and hostile schemas and grammars; none is answered by a 500."""
