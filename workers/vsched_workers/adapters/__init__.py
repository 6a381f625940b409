"""LoRA adapters in PEFT's format, applied to rows of different adapters in one pass."""
