"""Timelines as pictures: text and SVG."""
