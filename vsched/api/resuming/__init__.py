"""Answers that an engine before this one began: computed to their ends, and kept for their clients."""
