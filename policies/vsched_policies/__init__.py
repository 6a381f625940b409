"""The built-in policies: one package per kind, one module per policy."""
