"""What commands share at the terminal: options with one meaning everywhere, progress bars, files of figures."""
