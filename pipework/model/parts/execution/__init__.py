"""One part at work: the model's own forward around its units."""
