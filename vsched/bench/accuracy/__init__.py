"""`vsched bench accuracy`: output accuracy under different settings."""
