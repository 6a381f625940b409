"""Calls in forked processes, so that native code that parses client input cannot crash the engine."""
