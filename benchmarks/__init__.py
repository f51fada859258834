"""The questions that are answered by measuring, one folder each; see README.md."""
