"""The leader of a group: its decision log, its link to the ranks, and failure detection."""
