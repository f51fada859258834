"""Skip connections at run time: tensors that go past stages."""
