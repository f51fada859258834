"""A pipe whose workers are processes: how ranks meet, what they agree on, and what they do for each other."""
