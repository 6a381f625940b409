"""Contract suites: what vsched expects of a transport and of a worker plug-in."""
