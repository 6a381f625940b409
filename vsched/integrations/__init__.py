"""Hosts of policies in other programs; nothing else in vsched imports them."""
