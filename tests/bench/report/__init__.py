"""Tables and plots of a comparison, and the pages that they are written into."""
