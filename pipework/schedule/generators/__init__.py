"""Generators: one schedule a file, as a function from numbers of workers and micro-batches to orders."""
