"""Workers over transformers modelling code, with batching, paging and caching of their own.

The entry-point group `vsched.workers` refers to `vsched_workers.plugin:plugin`. Importing this package imports neither
torch nor transformers.
"""
