"""OpenAI's Responses API, without state."""
