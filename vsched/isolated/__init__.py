"""Calls in processes that may crash: native code that reads the bytes of clients runs there, not in the engine."""
