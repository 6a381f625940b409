"""Mutants of the code that handles loss, put-front, claims and digests: each must be noticed."""
