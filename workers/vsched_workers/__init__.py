"""Workers over transformers modelling code: Qwen2.5-VL and Qwen3-VL, with batching, paging and caching of our own.

`vsched_workers.plugin:plugin` is the object that the entry-point group `vsched.workers` names. Importing this package
imports neither torch nor transformers.
"""
