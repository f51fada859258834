"""How a model becomes a pipe: where it is cut, which worker and device each stage gets, and the schedule."""
