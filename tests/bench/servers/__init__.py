"""Installation, start, requests and monitoring of the compared servers."""
