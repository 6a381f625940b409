"""What policies see, and what they may answer: those of contracts that are too long for `vsched.policy`."""
