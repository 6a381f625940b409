"""The policy contracts that `vsched.policy` has from here: what all stand on, and those of images and caches."""
