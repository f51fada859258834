"""The questions that are answered by measuring, one folder each; see README.md.

A package, since other libraries install one of the same name (fairscale does), which would win over a mere folder.
"""
