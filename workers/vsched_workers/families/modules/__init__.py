"""The modules of families whose ranks do without transformers, whose import takes most of the start of a rank.

They have the names that transformers' modules have, down to the tensors, and compute the same to the bit:
`tests/workers/families/test_own_modules.py` compares them.
"""
