"""vLLM's own tests of its OpenAI server, run against vsched; `python -m tests.vllm_suite --help`."""
