"""What a schedule needs and costs: validation, simulation, bounds, comparison."""
