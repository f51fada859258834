"""Parts: any module as consecutive layers, each of which runs the module's own forward around its own units."""
