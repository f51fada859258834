"""The backward in two halves: input gradients now, weight gradients when the schedule says so."""
