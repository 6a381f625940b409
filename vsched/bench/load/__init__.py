"""The load generator, and `vsched bench serve`."""
