"""One step of the language model: packed inputs, paged attention, sampling."""
