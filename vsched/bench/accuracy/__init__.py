"""`vsched bench accuracy`: answers under every setting, compared."""
