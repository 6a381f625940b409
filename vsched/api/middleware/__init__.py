"""What stands before the routes: ids of requests, and who may call."""
