"""Training steps as graphs of an accelerator: each action is captured once, and replayed in every further step."""
