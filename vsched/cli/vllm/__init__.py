"""The flags of `vllm serve` that `vsched serve` understands."""
