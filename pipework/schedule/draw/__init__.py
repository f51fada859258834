"""Timelines as pictures: text, SVG and PNG."""
