"""Fields of requests that are only there to be accepted or refused."""
