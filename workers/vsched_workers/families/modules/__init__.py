"""Modules for families whose ranks run without transformers, whose import takes most of a rank's start time.

Modules and tensors have the same names as transformers', and the results are bit-identical:
`tests/workers/families/test_own_modules.py` compares them.

Most of that import is torch's compiler, its multi-device tensors and sympy: 4 of 7 s of CPU time for the ranks of
tiny25. Rejected: stand-ins for the modules that transformers imports, with half of the gain and broken by each new
version; importing transformers after the start, since the first request would wait.
"""
