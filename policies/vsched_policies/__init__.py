"""The built-in policies: one package a kind, one file a policy."""
