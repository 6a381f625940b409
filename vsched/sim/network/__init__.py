"""The network of a simulation: links that delay, drop and corrupt frames, and an in-process HTTP client."""
