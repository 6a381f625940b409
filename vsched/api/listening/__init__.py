"""Listening for HTTP: the socket, and uvicorn within the configured limits."""
