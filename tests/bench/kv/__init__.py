"""Effect of an 8-bit KV cache: `python -m tests.bench.kv CHECKPOINT`."""
