"""Contract test suites for transports and worker plug-ins."""
