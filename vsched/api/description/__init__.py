"""What the server can be asked, as a document and as a page."""
