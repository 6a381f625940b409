"""What a KV cache in 8 bits buys: `python -m tests.bench.kv CHECKPOINT`."""
