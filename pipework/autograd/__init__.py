"""Gradients: nodes in the caller's graph, aliases of parameters, and cuts of the graph between stages."""
