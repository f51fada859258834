"""How a model becomes a pipe: cut, devices, schedule, and what a step will cost."""
