"""Makes profiles: measures or estimates the layers of a model, for `pipework.planning`."""
