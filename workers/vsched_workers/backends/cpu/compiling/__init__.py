"""Kernels that are compiled before a model needs them: which those are, and the processes that compile them.

Compiling takes a core for seconds a kernel and the compiler takes 200 MiB. So child processes do it, on all cores, and
a rank reads what they left on disk (`kernel_store.py`). Where that does not work, a rank compiles when it comes to it.
"""
