"""Skip connections at run time: tensors that bypass stages."""
