"""OpenAI's Responses API, without state on the server."""
