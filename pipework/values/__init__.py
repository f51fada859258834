"""Values that cross a stage boundary or leave a process: flattened to tensors, encoded as JSON, and rebuilt."""
