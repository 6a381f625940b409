"""vLLM's own tests of its OpenAI server, run against vsched; `python -m tests.vllm_suite --help`.

The files of a pinned version run unchanged, in one process, with vLLM's Python sources as they are. Rejected: a copy of
the tests, which would be ours to maintain; skipping by test id, a list that each version breaks; stubs of vLLM's
modules; vLLM's CPU build, which is not on PyPI, and its wheel with gigabytes of CUDA libraries. CI does not run them:
they need a network and minutes.
"""
