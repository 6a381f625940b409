"""Adapters while a server runs: which there are, and how all ranks come to have them."""
