"""What a rank drafts, and where it takes it from."""
