"""LoRA adapters as PEFT writes them, applied to rows of different adapters in one pass."""
