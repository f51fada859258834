"""How gradients are formed and delivered: nodes in the caller's graph, aliases of parameters, cuts between stages."""
