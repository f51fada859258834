"""Checks of arguments that several schedules share."""

from __future__ import annotations


def positive_integer(name: str, value: object) -> None:
    """Refuse everything but an int that is at least 1.

    Args:
        name: the argument's name, for the message.
        value: what was given for it.

    Raises:
        TypeError: not an int (a bool is none).
        ValueError: less than 1.

    Example:
        >>> positive_integer("workers", 0)
        Traceback (most recent call last):
        ValueError: workers is 0: wanted an integer of at least 1
    """
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: wanted an integer of at least 1")
    if value < 1:
        raise ValueError(f"{name} is {value}: wanted an integer of at least 1")
