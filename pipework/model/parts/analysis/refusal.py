"""The error of a model that cannot be cut, which says why."""


class CannotCut(ValueError):
    """A model cannot be cut into parts."""
