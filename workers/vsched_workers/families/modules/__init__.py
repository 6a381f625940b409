"""Modules for families whose ranks run without transformers, whose import takes most of a rank's start time.

Modules and tensors have the same names as transformers', and the results are bit-identical:
`tests/workers/families/test_own_modules.py` compares them.
"""
