"""Cost of swapping a request, compared with recomputation."""
