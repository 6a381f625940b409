"""Compilation of kernels ahead of use: the list of a model's kernels, and the processes that compile them.

A kernel takes seconds of a core, and the compiler 200 MiB. So child processes compile on all cores, and a rank reads
the results from disk (`kernel_store.py`). If that fails, the rank compiles each kernel on first use.
"""
