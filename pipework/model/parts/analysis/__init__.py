"""What a dry run finds out about a model: its units, their order, and what must go from part to part."""
