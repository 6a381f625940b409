"""Request fields that are only accepted or refused."""
