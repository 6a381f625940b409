"""Where HTTP is listened to: the socket, and uvicorn within the limits of the configuration."""
