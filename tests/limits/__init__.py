"""Starts of the real engine under each limit of memory: served, or one clear error that names the right setting."""
