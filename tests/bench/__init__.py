"""The bench harness: vsched beside another server, or beside an earlier self, interleaved in one run."""
