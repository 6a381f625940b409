"""Tests inside vLLM: `make vllm`. They are skipped without it."""
