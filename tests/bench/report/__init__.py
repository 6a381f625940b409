"""Tables and plots of a comparison, and the pages that contain them."""
