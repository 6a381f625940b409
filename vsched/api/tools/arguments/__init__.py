"""Arguments of tool calls: incremental conversion from the model's format to JSON."""
