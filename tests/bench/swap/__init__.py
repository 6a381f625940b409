"""What swapping a request costs beside computing it again."""
