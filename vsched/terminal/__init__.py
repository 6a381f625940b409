"""Shared parts of commands: options with one meaning everywhere, progress bars, and files of figures."""
